"""The files of the disk tier: their layout, how a record is written, and when it is trusted.

    <folder>/<host>.disk.index    a header of 4 KiB, then a record of 128 bytes per slot
             <host>.disk.pages    the bytes of each slot's page

(``.host.`` for files in the host's memory, which take a device's pages where there is no disk.)

A record says which page is in its slot: the root digest, the keyed digest of all tokens from the
root to the page's end, and a checksum of the page's bytes. It is sealed, together with its slot,
with a key derived from the mesh's secret, so nothing is found that this mesh did not write there.
Tokens are not stored.

A record is zeroed before its page is overwritten, and written after it. So a writer that dies
half-way leaves no record. If the machine dies, the order of writes is not guaranteed; the checksum
shows that when the page is read. Nothing is ever fsynced: what is lost is computed again.
"""

from __future__ import annotations

import errno
import hashlib
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from pagemesh.pager.limits import PoolFacts
from pagemesh.pager.storage.page_memory import PageMemory, page_memory
from pagemesh.pager.storage.plain_file import File, Opener, PlainFile
from pagemesh.pager.tiers.chain_keys import chain_keys, root_chain
from pagemesh.pager.tiers.tier_events import (
    DiskContents,
    FoundRecords,
    LoadPages,
    StorePages,
)
from pagemesh.wire.cache_messages import Medium
from pagemesh.wire.identity import page_digests

_MAGIC, _VERSION = b"PMDISK01", 3
_HEAD_BYTES = 4_096
_RECORD_BYTES = 128
_HEAD = struct.Struct("<8sIIQQ32s")
_RECORD = struct.Struct("<QIIQQ16s32s32s")
"""Number, slot, index in its prefix, chain key, chain key of the page before, checksum, root
digest, prefix digest."""
_SEAL_BYTES = 16
_SCAN_BYTES = 1 << 20
_EMPTY = bytes(_RECORD_BYTES)
_Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DiskPlace:
    """Where the disk tier of a host is, and how large it may become."""

    folder: Path
    host: str
    bytes_max: int
    secret: bytes
    medium: Medium = "disk"
    memory_bytes: int = 0
    """How much of it is kept in memory too."""

    def path(self, part: str) -> Path:
        """The file of this host for ``part``."""
        name = "disk" if self.medium == "disk" else "host"
        return self.folder / f"{self.host}.{name}.{part}"

    def key(self, purpose: bytes) -> bytes:
        """A key derived from the secret for ``purpose`` (at most 16 bytes) alone."""
        return hashlib.blake2b(self.secret, digest_size=32, person=purpose).digest()


class Read(NamedTuple):
    """How many pages hold what they should, the slot of the first that does not, how many were in
    memory, how long these took, and whether that slot has the intact record of another page."""

    page_count: int
    bad_slot: int | None
    memory_count: int = 0
    memory_ns: int = 0
    is_other: bool = False


class _Hashed(NamedTuple):
    """A path under ``root``: for each of its pages the chain key of the page before it, and its
    digest."""

    root: bytes
    tokens: bytes
    befores: list[int]
    digests: list[bytes]


class DiskFile:
    """Records and pages of one host. Made by ``open``; after that one thread writes, others may
    call ``load`` and ``skip``."""

    def __init__(
        self, place: DiskPlace, facts: PoolFacts, index: File, pages: File, memory: PageMemory
    ) -> None:
        self._facts = facts
        self._key, self._chain_key = place.key(b"pagemesh-disk"), place.key(b"pagemesh-chains")
        self._index, self._pages = index, pages
        self._medium = place.medium
        self._memory = memory
        self._number = 0
        self.slot_count = place.bytes_max // (facts.page_bytes + _RECORD_BYTES)
        self._used = bytearray(self.slot_count)
        """1 where a record may be."""
        self._skipped: set[int] = set()
        self._hashed = _Hashed(b"", b"", [], [])
        """Of the path stored last: a long edge is stored from its end, in parts, and hashed
        once."""

    @classmethod
    def open(
        cls, place: DiskPlace, facts: PoolFacts, opener: Opener = PlainFile
    ) -> tuple[DiskFile, DiskContents]:
        """Take the files over, or create them, and list intact records. Raises ``OSError``."""
        memory = page_memory(facts.page_bytes, place.memory_bytes)
        place.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with ExitStack() as opened:
            index = opener(place.path("index"))
            opened.callback(index.close)
            pages = opener(place.path("pages"))
            opened.callback(pages.close)
            file = cls(place, facts, index, pages, memory)
            contents = file._adopt()
            opened.pop_all()
        return file, contents

    def close(self) -> None:
        """Let go of files and locks. Raises ``OSError``."""
        try:
            self._index.close()
        finally:
            self._pages.close()

    # Starting

    def _adopt(self) -> DiskContents:
        head = self._sealed(
            _HEAD.pack(
                _MAGIC, _VERSION, self._facts.page_size, self._facts.page_bytes, self._facts.group,
                self._facts.layout_digest,
            )
        )  # fmt: skip
        found = bytearray(len(head))
        self._index.read_into(memoryview(found), 0)
        if found != head:  # new, damaged, for other pages or another secret
            self._index.truncate(0)
            self._pages.truncate(0)
            self._index.write(head, 0)
        page_bytes = self._facts.page_bytes
        if self._index.size() > _HEAD_BYTES + self.slot_count * _RECORD_BYTES:
            self._index.truncate(_HEAD_BYTES + self.slot_count * _RECORD_BYTES)
        if self._pages.size() > self.slot_count * page_bytes:
            self._pages.truncate(self.slot_count * page_bytes)
        return self._scan(whole_pages=self._pages.size() // page_bytes)

    def _scan(self, whole_pages: int) -> DiskContents:
        """Every intact record, the oldest first."""
        lines: list[tuple[int, int, int, int, int]] = []
        roots: dict[bytes, int] = {}
        dropped = 0
        buffer = bytearray(_SCAN_BYTES)
        for first in range(0, self.slot_count, _SCAN_BYTES // _RECORD_BYTES):
            try:
                count = self._index.read_into(memoryview(buffer), self._offset(first))
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                count = min(_SCAN_BYTES, (self.slot_count - first) * _RECORD_BYTES)
                buffer[:] = b"\xff" * _SCAN_BYTES  # unreadable: no record is valid
            for at in range(0, count - _RECORD_BYTES + 1, _RECORD_BYTES):
                line = bytes(buffer[at : at + _RECORD_BYTES])
                if line == _EMPTY:
                    continue
                slot = first + at // _RECORD_BYTES
                self._used[slot] = 1
                record = self._record(line, slot)
                if record is None or slot >= whole_pages:
                    dropped += 1
                    continue
                number, _, _, chain, before, _, root, _ = record
                lines.append((number, slot, chain, before, roots.setdefault(root, len(roots))))
            if count < _SCAN_BYTES:
                break
        lines.sort()
        self._number = lines[-1][0] if lines else 0
        columns = list(zip(*lines, strict=True)) or [()] * 5
        records = FoundRecords(
            np.array(columns[1], np.uint32), np.array(columns[2], np.uint64),
            np.array(columns[3], np.uint64), np.array(columns[4], np.intp), tuple(roots),
        )  # fmt: skip
        return DiskContents(
            self.slot_count, records, dropped, self._chain_key, medium=self._medium,
            memory_pages=self._memory.page_count,
        )  # fmt: skip

    # Writing

    def store(self, command: StorePages, pages: _Bytes) -> None:
        """Write ``pages`` (uint8 [pages, page_bytes]) and their records, except in slots that are
        to be skipped. Raises ``OSError``: ``FileRemoved`` if nobody could find them again."""
        self._index.check_in_place()
        self._pages.check_in_place()
        *_, befores, digests = self._hashes(command)
        for row, slot, index, chain in zip(
            pages, command.slots, command.indexes, command.chains, strict=True
        ):
            self.empty(slot)
            if slot in self._skipped:
                continue
            data = memoryview(row)
            self._pages.write(data, slot * self._facts.page_bytes)
            self._number += 1
            record = _RECORD.pack(
                self._number, slot, index, chain, befores[index], xxh3_128_digest(data),
                command.root, digests[index],
            )  # fmt: skip
            if slot not in self._skipped:
                self._used[slot] = 1
                self._index.write(self._line(record), self._offset(slot))
                self._memory.put(slot, data)

    def _hashes(self, command: StorePages) -> _Hashed:
        """The hashes of a path that starts with the one of ``command``."""
        root, tokens, kept = command.root, command.tokens, self._hashed
        if kept.root == root and kept.tokens.startswith(tokens):
            return kept
        start, width = root_chain(self._chain_key, root), self._facts.page_token_bytes
        befores = [start, *chain_keys(start, tokens, 0, len(tokens), width)]
        self._hashed = _Hashed(root, tokens, befores, self._digests(root, tokens, 0))
        return self._hashed

    def skip(self, slots: Iterable[int]) -> None:
        """Keep ``store``, which may be running, from writing records into ``slots`` until they are
        forgotten. It may have done so already, so they must be emptied too."""
        self._skipped.update(slots)

    def forget(self, slot: int) -> None:
        """Empty ``slot``, which is no longer skipped. Raises ``OSError``."""
        self._skipped.discard(slot)
        self.empty(slot)

    def empty(self, slot: int) -> None:
        """Remove the record in ``slot``. Raises ``OSError``."""
        self._memory.drop(slot)
        if self._used[slot]:
            self._index.write(_EMPTY, self._offset(slot))
            self._used[slot] = 0

    # Reading

    def load(
        self,
        command: LoadPages,
        row: Callable[[int], memoryview],
        is_over: Callable[[], bool],
    ) -> Read:
        """Read the bytes of each page into its ``row``, asked for in order, until ``is_over``. May
        be called by several threads. Raises ``OSError``, and what ``row`` raises."""
        digests = self._digests(command.root, command.tokens, command.first_index)
        memory_count = memory_ns = 0
        bad_slot, is_other = None, False
        for done, slot in enumerate(command.slots):
            if is_over():
                break
            began_ns = time.perf_counter_ns()
            found = self._read(slot, row(done), command.root, digests[done])
            if found in ("", "other"):
                bad_slot, is_other = slot, found == "other"
                break
            if found == "memory":
                memory_count += 1
                memory_ns += time.perf_counter_ns() - began_ns
        else:
            done = len(command.slots)
        return Read(done, bad_slot, memory_count, memory_ns, is_other)

    def _read(
        self, slot: int, target: memoryview, root: bytes, digest: bytes
    ) -> Literal["memory", "disk", "other", ""]:
        """Where the page was read from; empty if it is not what it should be. ``other``: the record
        is intact and of another page of ``root``, which has the chain key that was looked for."""
        line = bytearray(_RECORD_BYTES)
        whole = _fill(self._index, memoryview(line), self._offset(slot))
        record = self._record(bytes(line), slot) if whole else None
        if record is None:
            return ""
        *_, checksum, found_root, found_digest = record
        if found_root != root:
            return ""
        if found_digest != digest:
            return "other"
        if self._memory.get(slot, target) and xxh3_128_digest(target) == checksum:
            return "memory"
        if (
            not _fill(self._pages, target, slot * len(target))
            or xxh3_128_digest(target) != checksum
        ):
            return ""
        self._memory.put(slot, target)
        return "disk"

    def _digests(self, root: bytes, tokens: bytes, first: int) -> list[bytes]:
        return list(page_digests(self._key, root, tokens, self._facts.page_size))[first:]

    def _record(
        self, line: bytes, slot: int
    ) -> tuple[int, int, int, int, int, bytes, bytes, bytes] | None:
        """What a record says, if its seal is ours and its slot right."""
        body = line[: _RECORD.size]
        if line != self._line(body):
            return None
        record: tuple[int, int, int, int, int, bytes, bytes, bytes] = _RECORD.unpack(body)
        return record if record[1] == slot else None

    def _line(self, body: bytes) -> bytes:
        return self._sealed(body).ljust(_RECORD_BYTES, b"\0")

    def _sealed(self, body: bytes) -> bytes:
        seal = hashlib.blake2b(body, digest_size=_SEAL_BYTES, key=self._key).digest()
        return body + seal

    @staticmethod
    def _offset(slot: int) -> int:
        return _HEAD_BYTES + slot * _RECORD_BYTES


def _fill(file: File, target: memoryview, offset: int) -> bool:
    """Fill ``target``. False if that fails: an unreadable sector damages only its page."""
    try:
        return file.read_into(target, offset) == len(target)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False
