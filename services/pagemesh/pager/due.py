"""What the pager's actor has to do though nobody asks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TickDue:
    """Time to look around."""


@dataclass(frozen=True, slots=True)
class LookDue:
    """The disk tier has something to say."""


@dataclass(frozen=True, slots=True)
class SweepDue:
    """What was invalidated waits for its next turn."""


@dataclass(frozen=True, slots=True)
class PutAwayDue:
    """Time to keep on disk what is cached: the service stops."""


Due = TickDue | LookDue | SweepDue | PutAwayDue
