"""What a bus reports about itself: its state, its counters, its subscriptions."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from pagemesh.runtime.bus.messages import Delivery, Refusal


class BusState(enum.Enum):
    CONNECTING = "connecting"
    CONNECTED = "connected"
    RECONNECTING = "reconnecting"
    CLOSED = "closed"


@dataclass(slots=True)
class BusCounters:
    """Since the bus was made."""

    sent: int = 0
    received: int = 0
    denied: int = 0
    refused_here: int = 0
    """Messages that were never sent: too large, too much unsent output, or no connection."""
    crashed: int = 0
    """Callbacks that raised something other than a fault."""
    connects: int = 0
    """Connections made after the first."""


@dataclass(frozen=True, slots=True)
class BusStatistics:
    state: BusState
    requests_waiting: int
    counters: BusCounters


@dataclass(slots=True, eq=False)
class Subscription:
    """Made by ``Bus.subscribe``."""

    subject: str
    queue: str
    on_delivery: Callable[[Delivery], None]
    refusal: Refusal
    link_id: int = 0
    denied: bool = False
