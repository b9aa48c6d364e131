"""What a benchmark notes about one request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Run:
    """When the tokens of one request came, in seconds after it was sent."""

    times_s: list[float] = field(default_factory=list)
