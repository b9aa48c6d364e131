"""Bugs that can be planted, to see that the simulator finds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bugs:
    """All off in a true run."""

    skip_second_fence: bool = False
    free_before_ack: bool = False
    sequence_goes_back: bool = False


NONE = Bugs()
