"""Events and commands of the disk tier; they are among those of ``events``.

    commands                               events, when the disk has done it
    StorePages   take these bytes, write   PagesWritten, or
                                           PagesNotTaken    nothing is, or will be, written
    LoadPages    read into these pages     PagesLoaded      always, be it with no page
    ForgetSlots  these hold nothing now
    SkipSlots    nor shall these, which are being written
    TellDamaged  people should hear of it
    GiveUpDisk   it is no disk to rely on   DiskFailed
    RememberRetired  nor shall these roots, not even by the next pager
    ForgetRetired    they are not there any more: this need not be remembered
                                           DiskOpening      first: there is to be a disk tier
                                           DiskFound        once: the tier is on, and has this
                                           DiskFailed       nothing is written or read any more

A *slot* is the place of one page on disk. Which slot holds what, and who may use it, is decided by
the core alone. It forgets no slot that is being written: it has it skipped, and forgets it then.
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
    """Whole records on disk, one entry each, the oldest first: ``slots`` uint32, ``chains`` and
    ``befores`` uint64 (``chain_keys``; of the page and of the one before it), ``root_indexes`` into
    ``roots``, which are digests."""

    slots: NDArray[np.uint32]
    chains: NDArray[np.uint64]
    befores: NDArray[np.uint64]
    root_indexes: NDArray[np.intp]
    roots: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class RetiredRoots:
    """Roots of which nothing that is on disk may be found; all of them, if it is
    ``everything``."""

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
"""That are remembered one by one."""


@dataclass(frozen=True, slots=True)
class DiskOpening:
    """There is to be a disk tier: ``DiskFound`` or ``DiskFailed`` follows."""


@dataclass(frozen=True, slots=True)
class DiskContents:
    """What an open disk holds. ``dropped_count``: records that are not whole, or of another secret.
    ``chain_key``: that of ``chain_keys.root_chain``."""

    slot_count: int
    records: FoundRecords
    dropped_count: int
    chain_key: bytes = field(repr=False)
    medium: Medium = "disk"
    memory_pages: int = 0
    """So many pages that were written or read last are in memory too."""


@dataclass(frozen=True, slots=True)
class DiskFound:
    """The disk is open. ``tier`` is made of its contents already: with a million records that takes
    seconds, in which others have to be served. ``retired``: what was to be forgotten, and may be
    there still."""

    tier: DiskTier
    dropped_count: int
    retired: RetiredRoots = NOTHING_RETIRED


class PagesWritten(msgspec.Struct, frozen=True):
    """The records in ``slots`` are whole."""

    slots: tuple[int, ...]


class PagesNotTaken(msgspec.Struct, frozen=True):
    """The bytes that were to be written into ``slots`` could not be had: those are as before."""

    slots: tuple[int, ...]


class PagesLoaded(msgspec.Struct, frozen=True):
    """The first ``page_count`` pages of a load hold what was asked for. ``bad_slot``: the record
    of the next one is not what it should be. It took ``read_us``; of that ``memory_us`` went to
    those ``memory_count`` pages that were in memory too."""

    load: int
    page_count: int
    read_us: int
    bad_slot: int | None = None
    memory_count: int = 0
    memory_us: int = 0
    is_other: bool = False
    """What is in ``bad_slot`` is whole, and another page's that has the same chain key."""


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
    """Read ``slots`` into ``pages``, in order, until one is not what it should be: pages
    ``first_index`` and on of the path ``tokens`` under ``root``. ``mover``: the worker incarnation
    in whose name they are held, and by whose hand they are filled, where they are on a device."""

    load: int
    pages: Pages
    slots: tuple[int, ...]
    root: bytes
    tokens: bytes
    first_index: int
    mover: int


class ForgetSlots(msgspec.Struct, frozen=True):
    """What is in ``slots`` must not be found again. That is done before what is to be written
    there after it is, and nobody waits for it: where a pager that dies before must not be
    followed by one that finds it, it says so by ``RememberRetired`` first."""

    slots: tuple[int, ...]


class SkipSlots(msgspec.Struct, frozen=True):
    """What is being written into ``slots`` must not be found. They are said to be written all the
    same, and are forgotten then."""

    slots: tuple[int, ...]


class TellDamaged(msgspec.Struct, frozen=True):
    """The record or the page in ``slot`` was not what it should be when it was read. It is
    forgotten already."""

    slot: int


class GiveUpDisk(msgspec.Struct, frozen=True):
    """Write and read nothing any more: of the last ``load_count`` loads ``damaged_count`` found
    damaged pages. The tier is off already."""

    damaged_count: int
    load_count: int


@dataclass(frozen=True, slots=True)
class RememberRetired:
    """Before the next command: keep it where the next pager finds it that these roots are
    ``retired``, beside what was before. ``number`` grows with each."""

    number: int
    retired: RetiredRoots


@dataclass(frozen=True, slots=True)
class ForgetRetired:
    """Once all that was to be stored before is: nothing is on disk of what was remembered up to
    ``number``, nor by earlier pagers."""

    number: int


@dataclass(frozen=True, slots=True)
class PutAway:
    """The pager is about to end, or whoever moves its pages, and the pool may go with it. Repeated
    until everything is written; ``anew`` the first time."""

    anew: bool = False


TierEvent = (
    DiskOpening | DiskFound | PagesWritten | PagesNotTaken | PagesLoaded | DiskFailed | PutAway
)
TierCommand = (
    StorePages | LoadPages | ForgetSlots | SkipSlots | TellDamaged | GiveUpDisk | RememberRetired
    | ForgetRetired
)  # fmt: skip
