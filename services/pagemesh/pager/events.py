"""What happens to a pager (events) and what it wants done (commands).

The actor performs commands strictly in order: headers are written before the answer that
hands the pages out, a lease word is changed before its holder is told.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagemesh.wire.messages import Message
from pagemesh.wire.pool_format import HeaderState
from pagemesh.wire.tokens import U32

U64Array = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class RootEntry:
    """One line of the pool's root table."""

    index: int
    digest: bytes
    live: bool


@dataclass(frozen=True, slots=True, eq=False)
class HeaderTable:
    """All headers of a pool, one entry a page. A header whose check word is wrong is INVALID.

    ``tokens``: uint32 [page_count, page_size]. ``identities`` and ``parents`` are ledger
    numbers; 0 is nobody.
    """

    states: NDArray[np.uint8]
    sequences: U64Array
    identities: U64Array
    parents: U64Array
    writers: U64Array
    roots: U32
    counts: U32
    tokens: U32


@dataclass(frozen=True, slots=True)
class Asked:
    """A request came in. ``call`` is opaque: it comes back in the ``Answer``."""

    call: object
    message: Message


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


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """Once, before anything else: what an earlier pager left in the pool.

    ``lease_words`` is the revocation table, uint64 [slots]. ``holders`` are the incarnations
    that still live; any other writer named in a header is dead.
    """

    headers: HeaderTable
    roots: tuple[RootEntry, ...]
    lease_words: U64Array
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. Several times a second."""


Event = Asked | HolderDied | Recovered | Tick


@dataclass(frozen=True, slots=True)
class Answer:
    """Reply to the request that brought ``call``."""

    call: object
    message: Message


@dataclass(frozen=True, slots=True)
class Notify:
    """Send a message to a worker by name, without expecting an answer."""

    worker: str
    message: Message


@dataclass(frozen=True, slots=True, eq=False)
class WriteHeaders:
    """Publish whole headers, in order. State, writer, root and count are the same for all.

    ``identities`` and ``parents`` are uint64 [pages]; ``tokens`` is packed ids, page after
    page, and empty when ``count`` is 0.
    """

    pages: U32
    state: HeaderState
    sequences: U64Array
    identities: U64Array
    parents: U64Array
    writer: int
    root: int
    count: int
    tokens: bytes


@dataclass(frozen=True, slots=True, eq=False)
class SetStates:
    """Store only the state and sequence word of each header."""

    pages: U32
    state: HeaderState
    sequences: U64Array


@dataclass(frozen=True, slots=True)
class SetLeaseWord:
    """Store ``value`` at ``slot`` of the revocation table: a lease id, or 0 for nobody."""

    slot: int
    value: int


@dataclass(frozen=True, slots=True)
class StoreRoot:
    """Write a line of the root table."""

    index: int
    digest: bytes
    live: bool


@dataclass(frozen=True, slots=True, eq=False)
class PagesStored:
    """``pages``, holding ``tokens`` (packed), became matchable under ``root``. ``after`` is
    the page before them, or empty when they start the tree."""

    root: bytes
    after: U32
    pages: U32
    tokens: bytes


@dataclass(frozen=True, slots=True, eq=False)
class PagesDropped:
    """``pages`` are not matchable any more."""

    pages: U32


@dataclass(frozen=True, slots=True)
class ProbeHolder:
    """Try the lock of an incarnation; when it is free, come back with ``HolderDied``."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class KillHolder:
    """End the process of an incarnation: it does not let go of pages that others wait for."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class RememberHolder:
    """Keep, beside the pool, which lock proves that an incarnation lives."""

    holder: Holder


@dataclass(frozen=True, slots=True)
class ForgetHolder:
    """The incarnation is gone and has nothing left in the pool."""

    incarnation: int


Command = (
    Answer
    | Notify
    | WriteHeaders
    | SetStates
    | SetLeaseWord
    | StoreRoot
    | PagesStored
    | PagesDropped
    | ProbeHolder
    | KillHolder
    | RememberHolder
    | ForgetHolder
)
