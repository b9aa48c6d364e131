"""The one connection of a service to NATS, and the only package that imports nats."""

from pagemesh.runtime.bus.bus import Bus
from pagemesh.runtime.bus.messages import Delivery, Headers, Outgoing, Reply
from pagemesh.runtime.bus.replies import Asked, Inbox
from pagemesh.runtime.bus.state import BusCounters, BusState, BusStatistics, Subscription

__all__ = [
    "Asked",
    "Bus",
    "BusCounters",
    "BusState",
    "BusStatistics",
    "Delivery",
    "Headers",
    "Inbox",
    "Outgoing",
    "Reply",
    "Subscription",
]
