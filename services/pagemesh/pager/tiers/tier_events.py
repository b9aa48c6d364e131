"""Events and commands of the disk tier; they are part of those in ``events``.

    commands                               events, when the disk has done it
    StorePages   take these bytes, write   PagesWritten, or
                                           PagesNotTaken    nothing is, or will be, written
    LoadPages    read into these pages     PagesLoaded      always, be it with no page
    ForgetSlots  empty these slots
    SkipSlots    keep these, which are being written, empty
    TellDamaged  log damage
    GiveUpDisk   stop using the disk       DiskFailed
    RememberRetired  these roots must not be found, not even by the next pager
    ForgetRetired    the disk has nothing of these roots any more
                                           DiskOpening      first: there will be a disk tier
                                           DiskFound        once: the tier is on, with contents
                                           DiskFailed       nothing is written or read any more

A *slot* is the place of one page on disk. The core alone decides which slot holds what, and who may
use it. A slot that is being written is first skipped, and forgotten once that is over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from pagemesh.pager.pages.runs import Pages
from pagemesh.wire.cache_messages import Medium

if TYPE_CHECKING:
    from pagemesh.pager.tiers.disk_tier import DiskTier


@dataclass(frozen=True, slots=True, eq=False)
class FoundRecords:
    """Intact records on disk, one entry each, the oldest first: ``slots`` uint32; ``chains`` and
    ``befores`` uint64, the chain keys (``chain_keys``) of the page and of the one before it;
    ``root_indexes`` into ``roots``, which are digests."""

    slots: NDArray[np.uint32]
    chains: NDArray[np.uint64]
    befores: NDArray[np.uint64]
    root_indexes: NDArray[np.intp]
    roots: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class RetiredRoots:
    """Roots whose pages on disk must not be found any more; all roots if ``everything``."""

    roots: frozenset[bytes] = frozenset()
    everything: bool = False

    def __or__(self, other: RetiredRoots) -> RetiredRoots:
        roots = self.roots | other.roots
        everything = self.everything or other.everything or len(roots) > RETIRED_ROOTS_MAX
        return RetiredRoots(frozenset() if everything else roots, everything)

    def __bool__(self) -> bool:
        return self.everything or bool(self.roots)

    def __contains__(self, root: bytes) -> bool:
        return self.everything or root in self.roots


NOTHING_RETIRED = RetiredRoots()
RETIRED_ROOTS_MAX = 1_024
"""How many are remembered one by one; more count as ``everything``."""


@dataclass(frozen=True, slots=True)
class DiskOpening:
    """There will be a disk tier: ``DiskFound`` or ``DiskFailed`` follows."""


@dataclass(frozen=True, slots=True)
class DiskContents:
    """What an open disk holds. ``dropped_count``: records that are damaged, or of another secret.
    ``chain_key``: the key for ``chain_keys.root_chain``."""

    slot_count: int
    records: FoundRecords
    dropped_count: int
    chain_key: bytes = field(repr=False)
    medium: Medium = "disk"
    memory_pages: int = 0
    """How many pages, those written or read last, are in memory too."""


@dataclass(frozen=True, slots=True)
class DiskFound:
    """The disk is open. ``tier`` is already made of its contents, on another thread: with a million
    records that takes seconds, in which others have to be served. ``retired``: roots that were to
    be forgotten and may still be there."""

    tier: DiskTier
    dropped_count: int
    retired: RetiredRoots = NOTHING_RETIRED


class PagesWritten(msgspec.Struct, frozen=True):
    """What was to be written into ``slots`` is written, unless it was skipped."""

    slots: tuple[int, ...]


class PagesNotTaken(msgspec.Struct, frozen=True):
    """The bytes to be written into ``slots`` could not be copied: the slots are as before."""

    slots: tuple[int, ...]


class PagesLoaded(msgspec.Struct, frozen=True):
    """The first ``page_count`` pages of a load hold what was asked for. ``bad_slot``: that of the
    next page, if its record or bytes are not what they should be. The load took ``read_us``, of
    which ``memory_us`` went to the ``memory_count`` pages that were in memory too."""

    load: int
    page_count: int
    read_us: int
    bad_slot: int | None = None
    memory_count: int = 0
    memory_us: int = 0
    is_other: bool = False
    """``bad_slot`` has the intact record of another page, with the same chain key."""


@dataclass(frozen=True, slots=True)
class DiskFailed:
    """The disk cannot be used; ``why`` in a line, for people."""

    why: str


class StorePages(msgspec.Struct, frozen=True, eq=False):
    """Take the bytes of ``pages`` before the next command is performed, and write them into
    ``slots``. The i-th holds page ``indexes[i]`` of the path ``tokens`` (packed, from the root
    on)."""

    pages: Pages
    slots: tuple[int, ...]
    indexes: tuple[int, ...]
    chains: tuple[int, ...]
    root: bytes
    tokens: bytes


class LoadPages(msgspec.Struct, frozen=True, eq=False):
    """Read ``slots`` into ``pages``, in order, until one is not what it should be. They are the
    pages of the path ``tokens`` under ``root``, from ``first_index`` on. ``mover``: who holds and
    fills them: a worker incarnation if they are on a device, else the pager."""

    load: int
    pages: Pages
    slots: tuple[int, ...]
    root: bytes
    tokens: bytes
    first_index: int
    mover: int


class ForgetSlots(msgspec.Struct, frozen=True):
    """What is in ``slots`` must not be found again. The slots are emptied before what is written
    there later, and nobody waits for that: if not even the next pager may find it, should this one
    die before, ``RememberRetired`` comes first."""

    slots: tuple[int, ...]


class SkipSlots(msgspec.Struct, frozen=True):
    """What is being written into ``slots`` must not be found. ``PagesWritten`` follows all the
    same, after which the slots are forgotten."""

    slots: tuple[int, ...]


class TellDamaged(msgspec.Struct, frozen=True):
    """Log that the record or page in ``slot``, already forgotten, was found to be damaged."""

    slot: int


class GiveUpDisk(msgspec.Struct, frozen=True):
    """Write and read nothing any more: of the last ``load_count`` loads ``damaged_count`` found
    damaged pages. The tier is off already."""

    damaged_count: int
    load_count: int


@dataclass(frozen=True, slots=True)
class RememberRetired:
    """Before the next command is performed, note for the next pager that these roots are
    ``retired``, in addition to what was noted before. ``number`` grows with each command."""

    number: int
    retired: RetiredRoots


@dataclass(frozen=True, slots=True)
class ForgetRetired:
    """Once all earlier writes are done, drop what was remembered up to ``number`` and by earlier
    pagers: the disk has none of it any more."""

    number: int


@dataclass(frozen=True, slots=True)
class PutAway:
    """Store what is cached: the pager is about to end, or the last worker that can move its pages,
    and the pool may go with it. Repeated until everything is written; ``anew`` the first time."""

    anew: bool = False


TierEvent = (
    DiskOpening | DiskFound | PagesWritten | PagesNotTaken | PagesLoaded | DiskFailed | PutAway
)
TierCommand = (
    StorePages | LoadPages | ForgetSlots | SkipSlots | TellDamaged | GiveUpDisk | RememberRetired
    | ForgetRetired
)  # fmt: skip
