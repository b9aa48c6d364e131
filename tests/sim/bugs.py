"""Bugs that can be planted, to see that the simulator finds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bugs:
    """All off in a true run."""

    skip_second_fence: bool = False
    free_before_ack: bool = False
    sequence_goes_back: bool = False
    take_late: bool = False
    """A page is written to disk as it is when the disk comes to it."""
    trust_disk: bool = False
    """What is read from disk is believed unseen."""


NONE = Bugs()
