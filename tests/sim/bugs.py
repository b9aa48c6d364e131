"""Bugs that can be planted, to check that the simulator finds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bugs:
    """All off in a normal run."""

    skip_second_fence: bool = False
    free_before_ack: bool = False
    sequence_goes_back: bool = False
    take_late: bool = False
    """A page is copied only when the disk comes to write it."""
    trust_disk: bool = False
    """Pages read from disk are not verified."""
    keep_retired: bool = False
    """Pages of an invalidated root are still found on disk."""
    keep_root_lines: bool = False
    """Invalidated roots remain live in the root table."""
    take_up_invalidated: bool = False
    """A lease from before a restart is taken up although its root has been invalidated since."""
    give_named_lines: bool = False
    """A line of the root table is reused for another root although pages from before a restart
    still refer to it, namely those of leases that have not been declared yet."""
    free_limbo: bool = False
    """Pages whose headers a dying pager tore are freed once all workers have declared, although a
    lost lease may have them."""
    believe_any_asker: bool = False
    """A worker accepts any grant that a gateway asked for in its name, whichever lives of worker
    and pager it was asked of."""
    take_any_weights: bool = False
    """A worker accepts requests meant for a worker of the same name with other weights."""
    give_up_filling: bool = False
    """Pages of a device are freed although a worker may still be filling them."""
    forget_movers: bool = False
    """A new pager does not check that workers are done with what the last pager asked them."""


NONE = Bugs()
