"""What a benchmark records of one request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Run:
    """Arrival times of the tokens of one request, in seconds since it was sent."""

    times_s: list[float] = field(default_factory=list)
