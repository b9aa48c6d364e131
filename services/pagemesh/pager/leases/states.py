"""The states of leases, tickets and sessions, and the moves between them.

lease     HELD <----> OFFERED         held by a session, or in transit under a ticket
           |  `-----.    |
           v         v   v
        REVOKED ---> ENDED            REVOKED: its pages drain until the holder lets go

ticket    OFFERED --> REDEEMED | CANCELLED | EXPIRED

session   OPEN <----> EXPIRED         reopened only by OpenSession, without its leases
           |             |
           v             v
          DEAD <------ (any)
        SILENT --> OPEN | DEAD        SILENT: known only from an earlier pager life
"""

from __future__ import annotations

import enum
from typing import Literal

RevokeReason = Literal["preempted", "session_expired", "ticket_expired", "stale"]


class IllegalMove(AssertionError):
    """A lifecycle was asked for a move that its table does not allow: a bug in the pager. The
    message contains the history."""


class LeaseState(enum.Enum):
    HELD = "held"
    OFFERED = "offered"
    REVOKED = "revoked"
    ENDED = "ended"

    __hash__ = object.__hash__  # members are singletons, and Enum's own hash is a Python call


class TicketState(enum.Enum):
    OFFERED = "offered"
    REDEEMED = "redeemed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class SessionState(enum.Enum):
    SILENT = "silent"
    OPEN = "open"
    EXPIRED = "expired"
    DEAD = "dead"


LEASE_MOVES: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.HELD: frozenset({LeaseState.OFFERED, LeaseState.REVOKED, LeaseState.ENDED}),
    LeaseState.OFFERED: frozenset({LeaseState.HELD, LeaseState.ENDED}),
    LeaseState.REVOKED: frozenset({LeaseState.ENDED}),
    LeaseState.ENDED: frozenset(),
}
TICKET_MOVES: dict[TicketState, frozenset[TicketState]] = {
    TicketState.OFFERED: frozenset(
        {TicketState.REDEEMED, TicketState.CANCELLED, TicketState.EXPIRED}
    ),
    TicketState.REDEEMED: frozenset(),
    TicketState.CANCELLED: frozenset(),
    TicketState.EXPIRED: frozenset(),
}
SESSION_MOVES: dict[SessionState, frozenset[SessionState]] = {
    SessionState.SILENT: frozenset({SessionState.OPEN, SessionState.DEAD}),
    SessionState.OPEN: frozenset({SessionState.EXPIRED, SessionState.DEAD}),
    SessionState.EXPIRED: frozenset({SessionState.OPEN, SessionState.DEAD}),
    SessionState.DEAD: frozenset(),
}
