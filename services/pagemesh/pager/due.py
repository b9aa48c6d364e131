"""Work of the pager's actor that no request asks for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TickDue:
    """Time for periodic work."""


@dataclass(frozen=True, slots=True)
class LookDue:
    """The disk tier has reported something."""


@dataclass(frozen=True, slots=True)
class SweepDue:
    """More of what was invalidated waits to be freed."""


@dataclass(frozen=True, slots=True)
class PutAwayDue:
    """Time to store on disk what is cached: the service is stopping."""


Due = TickDue | LookDue | SweepDue | PutAwayDue
