"""Page headers, revocation words and the root table of a mapped pool.

The pager publishes, every process reads. The order of stores that makes this safe is ensured by the
native library (``kernels/native/headers.cpp``), since numpy guarantees no order. Sections and words
are laid out by ``wire.pool_format``.

A publication stores INVALID with the new sequence, then the body, then the check word, then the
state. So a reader that sees a state other than INVALID sees the body that belongs to it, and a
writer that dies half-way leaves a header that no reader believes.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagemesh.kernels.native.library import library
from pagemesh.wire.pool_format import (
    LEASE_SLOT_COUNT_MAX,
    ROOT_COUNT_MAX,
    ROOT_ENTRY_BYTES,
    SEQUENCE_BITS,
    SEQUENCE_MASK,
    UNTIL_FOREVER_MS,
    PoolFormat,
)

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
_ROOT_LIVE, _ROOT_RETIRED = 1, 2
_UNTIL_WORD, _TOKENS_WORD = 6, 8


def address_of(array: NDArray[np.generic]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


@dataclass(frozen=True, slots=True)
class HeaderBatch:
    """Headers of ``n`` pages, column by column.

    ``pages`` uint32, ``states`` uint8, ``sequences``, ``identities``, ``parents`` and ``writers``
    uint64, ``roots`` and ``counts`` uint32, ``until_ms`` uint64 (see ``wire.pool_format``; 0: no
    end), all ``[n]``; ``tokens`` uint32 ``[n, page_size]``, of which the first ``counts[i]`` of row
    i are valid.
    """

    pages: U32
    states: U8
    sequences: U64
    identities: U64
    parents: U64
    writers: U64
    roots: U32
    counts: U32
    tokens: U32
    until_ms: U64


@dataclass(frozen=True, slots=True)
class HeaderScan:
    """What a scan found, for pages ``batch.pages``. Where ``torn`` is true, only the sequence can
    be trusted."""

    batch: HeaderBatch
    torn: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RootEntry:
    """A prefix tree's root as stored; a retired one serves no new request."""

    digest: bytes
    live: bool


class HeaderTable:
    """The pager-written sections of a pool, over its mapped bytes.

    ``mapped``: the whole pool file, uint8. Only the pager may call methods that write; headers are
    written by ``HeaderWriter``.
    """

    def __init__(self, mapped: U8, form: PoolFormat) -> None:
        if len(mapped) < form.file_bytes:
            raise ValueError(f"{len(mapped)} bytes are mapped, the pool has {form.file_bytes}")
        self.mapped = mapped
        self.form = form
        self._native = library()
        base = address_of(mapped)
        self._table = base + form.headers_offset
        self._leases = base + form.revocation_offset
        self._roots = base + form.roots_offset

    # --- written by the pager ----------------------------------------------------------------

    def set_lease_word(self, slot: int, value: int) -> None:
        """Store a lease's revocation word: the lease id while it stands, anything else after."""
        if not 0 <= slot < LEASE_SLOT_COUNT_MAX:
            raise IndexError(f"lease slot {slot} is not below {LEASE_SLOT_COUNT_MAX}")
        self._native.pm_word_store(self._leases + 8 * slot, value)

    def store_root(self, index: int, digest: bytes, *, live: bool) -> None:
        """Store a root. Its last word, which has the check, is stored last, so a torn entry does
        not count."""
        if not 0 <= index < ROOT_COUNT_MAX:
            raise IndexError(f"root {index} is not below {ROOT_COUNT_MAX}")
        if len(digest) != 32:
            raise ValueError(f"a root's digest has 32 bytes, got {len(digest)}")
        at = self.form.roots_offset + index * ROOT_ENTRY_BYTES
        word = _root_word(digest, live)
        native, address = self._native, self._roots + index * ROOT_ENTRY_BYTES
        if self.mapped[at : at + 32].tobytes() != digest:
            native.pm_word_store(address + 32, 0)
            for offset in range(0, 32, 8):
                part = int.from_bytes(digest[offset : offset + 8], "little")
                native.pm_word_store(address + offset, part)
        native.pm_word_store(address + 32, word)

    # --- read by everybody -------------------------------------------------------------------

    def fresh_count(self, pages: U32, granted_at: int) -> int:
        """How many of ``pages``, from the first on, still belong to a grant: HELD or COMMITTED,
        with a ledger sequence of at most ``granted_at``. ``len(pages)`` means that all do;
        otherwise the result is the index of the first stale one."""
        plain = np.ascontiguousarray(pages, np.uint32)
        fresh: int = self._native.pm_headers_fresh(
            self._table,
            self.form.header_words,
            address_of(plain),
            len(plain),
            self.form.page_count,
            granted_at,
        )
        return fresh

    def watch(self, slots: Sequence[int] | U32, leases: Sequence[int] | U64) -> LeaseWatch:
        """A watch that tells, whenever asked, whether each lease stands by the word in its slot.
        Raises ``ValueError`` when there are not as many leases as slots."""
        return LeaseWatch(self._native, self._leases, slots, leases)

    def lease_word(self, slot: int) -> int:
        """The revocation word of ``slot``."""
        if not 0 <= slot < LEASE_SLOT_COUNT_MAX:
            raise IndexError(f"lease slot {slot} is not below {LEASE_SLOT_COUNT_MAX}")
        word: int = self._native.pm_word_load(self._leases + 8 * slot)
        return word

    def scan(self, first: int = 0, count: int | None = None) -> HeaderScan:
        """Copy headers ``[first, first + count)`` out, each consistent or marked torn."""
        number = self.form.page_count - first if count is None else count
        if first < 0 or number < 0 or first + number > self.form.page_count:
            raise IndexError(f"{number} pages from {first} are not in a pool of "
                             f"{self.form.page_count}")  # fmt: skip
        words = np.zeros((number, self.form.header_words), np.uint64)
        torn = np.zeros(number, np.uint8)
        self._native.pm_headers_scan(
            self._table,
            self.form.header_words,
            first,
            number,
            address_of(words),
            address_of(torn),
        )
        return HeaderScan(_columns(words, first, self.form.page_size), torn.astype(np.bool_))

    def roots(self) -> dict[int, RootEntry]:
        """Every complete entry of the root table, by index."""
        start = self.form.roots_offset
        table = self.mapped[start : start + ROOT_COUNT_MAX * ROOT_ENTRY_BYTES]
        words = table.reshape(ROOT_COUNT_MAX, ROOT_ENTRY_BYTES)[:, 32:].copy().view(np.uint64)
        found: dict[int, RootEntry] = {}
        for index in np.flatnonzero(words[:, 0]).tolist():
            digest = table[index * ROOT_ENTRY_BYTES : index * ROOT_ENTRY_BYTES + 32].tobytes()
            for live in (True, False):
                if int(words[index, 0]) == _root_word(digest, live):
                    found[index] = RootEntry(digest, live)
        return found


class LeaseWatch:
    """Leases and the slots of their revocation words, ready to be checked in every step."""

    def __init__(
        self,
        native: ctypes.CDLL,
        words_address: int,
        slots: Sequence[int] | U32,
        leases: Sequence[int] | U64,
    ) -> None:
        self._slots = np.ascontiguousarray(slots, np.uint32)
        self._expected = np.ascontiguousarray(leases, np.uint64)
        count = len(self._slots)
        if count != len(self._expected):
            raise ValueError(f"{count} slots for {len(self._expected)} leases")
        self._same = np.zeros(count, np.uint8)
        self._ask = native.pm_words_same
        self.addresses = (
            words_address, LEASE_SLOT_COUNT_MAX, address_of(self._slots),
            address_of(self._expected), address_of(self._same),
        )  # fmt: skip
        """As in ``PmRun``: address and number of the words, then the addresses of slots, leases and
        results."""
        self._arguments = (*self.addresses[:4], count, self.addresses[4])

    def __len__(self) -> int:
        return len(self._slots)

    def standing(self) -> list[bool]:
        """For each slot, whether its word holds its lease now. A slot out of range holds none."""
        self._ask(*self._arguments)
        return list(map(bool, self._same.tolist()))


def _columns(words: U64, first: int, page_size: int) -> HeaderBatch:
    count = len(words)
    return HeaderBatch(
        pages=np.arange(first, first + count, dtype=np.uint32),
        states=(words[:, 0] >> np.uint64(SEQUENCE_BITS)).astype(np.uint8),
        sequences=words[:, 0] & np.uint64(SEQUENCE_MASK),
        identities=words[:, 1].copy(),
        parents=words[:, 2].copy(),
        writers=words[:, 3].copy(),
        roots=words[:, 4].astype(np.uint32),
        counts=(words[:, 4] >> np.uint64(32)).astype(np.uint32),
        tokens=np.ascontiguousarray(words[:, _TOKENS_WORD:]).view(np.uint32)[:, :page_size],
        until_ms=words[:, _UNTIL_WORD] & np.uint64(UNTIL_FOREVER_MS),
    )


def _root_word(digest: bytes, live: bool) -> int:
    check = int.from_bytes(hashlib.sha256(digest).digest()[:7], "little")
    return check << 8 | (_ROOT_LIVE if live else _ROOT_RETIRED)
