"""What happens to a pager (events) and what it wants done (commands).

The actor performs commands strictly in order: headers are written before the answer that
hands the pages out, a lease word is changed before its holder is told.

The events and commands of ordinary requests are msgspec structs: as frozen as dataclasses, and ten
times faster to create. None is ever part of a reference cycle, so the garbage collector need not
look at them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from pagemesh.pager.pages.column import Numbers, U64Array
from pagemesh.pager.pages.runs import Pages
from pagemesh.pager.tiers.tier_events import TierCommand, TierEvent
from pagemesh.pager.tree.lifetime import FOREVER_MS
from pagemesh.wire.messages import Message
from pagemesh.wire.pool_format import HeaderState
from pagemesh.wire.tokens import U32


@dataclass(frozen=True, slots=True)
class RootEntry:
    """One line of the pool's root table."""

    index: int
    digest: bytes
    live: bool


@dataclass(frozen=True, slots=True, eq=False)
class HeaderTable:
    """All headers of a pool, one entry a page. A header whose check word is wrong is INVALID.

    ``tokens``: uint32 [page_count, page_size]. ``identities`` and ``parents`` are ledger numbers; 0
    for none. ``until_ms``: when each page expires, in the core's time; FOREVER_MS: never.
    """

    states: NDArray[np.uint8]
    sequences: U64Array
    identities: U64Array
    parents: U64Array
    writers: U64Array
    roots: U32
    counts: U32
    tokens: U32
    until_ms: NDArray[np.int64]


class Asked(msgspec.Struct, frozen=True, gc=False):
    """A request came in. ``call`` is opaque: it comes back in the ``Answer``. ``trace``: the
    trace it belongs to, 32 hexadecimal digits, or empty."""

    call: object
    message: Message
    trace: str = ""


@dataclass(frozen=True, slots=True)
class HolderDied:
    """The lock of a worker incarnation is free: its process is gone, whatever it held."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker incarnation whose lock was held when this pager started."""

    incarnation: int
    worker: str
    lock_name: str


@dataclass(frozen=True, slots=True)
class KeptPin:
    """A pin in the form that outlives the pager: the first ``pages`` pages of a prefix in the tree
    ``root``. The last of them has ``identity``, a ledger number that no other page ever gets.
    ``expires_in_ms``: None for never."""

    name: str
    root: bytes
    identity: int
    pages: int
    expires_in_ms: int | None

    def after(self, passed_ms: int) -> KeptPin:
        """This pin when ``passed_ms`` have passed."""
        left_ms = self.expires_in_ms
        return self if left_ms is None else replace(self, expires_in_ms=left_ms - passed_ms)

    @property
    def is_over(self) -> bool:
        return self.expires_in_ms is not None and self.expires_in_ms <= 0


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """Once, before anything else: what an earlier pager left in the pool, and beside it.

    ``lease_words`` is the revocation table, uint64 [slots]. ``holders`` are the incarnations
    that still live; any other writer named in a header is dead. ``pins``: the oldest first.
    """

    headers: HeaderTable
    roots: tuple[RootEntry, ...]
    lease_words: U64Array
    holders: tuple[Holder, ...]
    pins: tuple[KeptPin, ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. For ``away_ms`` of it, which may have begun before the last tick, nobody could
    be heard, since the pager was stopped or the bus was away."""

    away_ms: int = 0


@dataclass(frozen=True, slots=True)
class Sweep:
    """A turn to free some of what was invalidated."""


Event = Asked | HolderDied | Recovered | Tick | Sweep | TierEvent


class Answer(msgspec.Struct, frozen=True, gc=False):
    """Reply to the request that brought ``call``."""

    call: object
    message: Message


class Notify(msgspec.Struct, frozen=True, gc=False):
    """Send a message to a worker by name, without expecting an answer."""

    worker: str
    message: Message


class WriteHeaders(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Publish whole headers, in order. State, writer and root are the same for all.

    ``sequences``: one a page. ``tokens``: packed ids, equally many for each page; empty while they
    are not known. Identities count up from ``first_identity`` (0: they have none), and each page's
    parent is the one before it; that of the first is ``parent``. ``until_ms``: when the pages
    expire, unless extended by ``KeepUntil``.
    """

    pages: Pages
    state: HeaderState
    sequences: Numbers
    writer: int
    root: int
    first_identity: int = 0
    parent: int = 0
    tokens: bytes = b""
    until_ms: int = FOREVER_MS

    @property
    def identities(self) -> U64Array:
        """uint64 [pages]."""
        count = len(self.pages)
        if not self.first_identity:
            return np.zeros(count, np.uint64)
        return np.arange(self.first_identity, self.first_identity + count, dtype=np.uint64)

    @property
    def parents(self) -> U64Array:
        """uint64 [pages]; 0 for no parent."""
        parents = np.zeros(len(self.pages), np.uint64)
        parents[:1] = self.parent
        parents[1:] = self.identities[:-1]
        return parents

    @property
    def token_count(self) -> int:
        """Token ids in each header."""
        return len(self.tokens) // (4 * len(self.pages)) if len(self.pages) else 0


class SetStates(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Store only the state and sequence word of each header."""

    pages: Pages
    state: HeaderState
    sequences: Numbers


class KeepUntil(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Extend the lifetime of those ``pages`` that are committed and would expire to ``until_ms``;
    headers with a later time stay as they are."""

    pages: Pages
    until_ms: int


class SetLeaseWord(msgspec.Struct, frozen=True, gc=False):
    """Store ``value`` at ``slot`` of the revocation table: a lease id, or 0 for nobody."""

    slot: int
    value: int


@dataclass(frozen=True, slots=True)
class StoreRoot:
    """Write a line of the root table."""

    index: int
    digest: bytes
    live: bool


class PagesStored(msgspec.Struct, frozen=True, eq=False, gc=False):
    """``pages``, holding ``tokens`` (packed), became matchable under ``root``. ``after`` is
    the page before them, or empty when they start the tree."""

    root: bytes
    after: Pages
    pages: Pages
    tokens: bytes


class PagesDropped(msgspec.Struct, frozen=True, eq=False, gc=False):
    """``pages`` are not matchable any more."""

    pages: Pages


@dataclass(frozen=True, slots=True)
class ProbeHolder:
    """Try the lock of an incarnation; when it is free, come back with ``HolderDied``."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class KillHolder:
    """Kill the process of an incarnation, which does not let go of pages that others wait for."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class RememberHolder:
    """Keep, beside the pool, which lock proves that an incarnation lives."""

    holder: Holder


@dataclass(frozen=True, slots=True)
class ForgetHolder:
    """The incarnation is gone and has nothing left in the pool."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class StorePins:
    """Keep these pins, and no others, for the next pager of this pool."""

    pins: tuple[KeptPin, ...]


Command = (
    Answer
    | Notify
    | WriteHeaders
    | SetStates
    | KeepUntil
    | SetLeaseWord
    | StoreRoot
    | PagesStored
    | PagesDropped
    | ProbeHolder
    | KillHolder
    | RememberHolder
    | ForgetHolder
    | StorePins
    | TierCommand
)
