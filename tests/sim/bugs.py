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
    keep_retired: bool = False
    """What is on disk of a root that was invalidated is found still."""
    keep_root_lines: bool = False
    """What was invalidated is live in the root table still."""
    take_up_invalidated: bool = False
    """A lease of before a restart is taken up though its root was invalidated since."""
    give_named_lines: bool = False
    """A line of the root table is given to another root though pages of before a restart name it,
    of leases that nobody has declared yet."""
    free_limbo: bool = False
    """What a dying pager tore is free when all have declared, though a lost lease may have it."""
    believe_any_asker: bool = False
    """Whoever a gateway asked as, and whatever life of the pager, the answer is believed."""
    take_any_weights: bool = False
    """A worker takes what was meant for one of its name with other weights."""
    give_up_filling: bool = False
    """Pages of a device are given back though a worker may be filling them."""
    forget_movers: bool = False
    """A new pager does not ask a worker whether it is done with what the last one asked it for."""


NONE = Bugs()
