"""The first 4 KiB of a pool: what the pool is, and which life of its pager this is.

    offset  0  magic            8 bytes
            8  format version   uint32
           12  group            uint32
           16  page count       uint64
           24  page size        uint64   slots
           32  page bytes       uint64
           40  pool incarnation uint64
           48  layout digest    32 bytes
           80  check            8 bytes  of all the above
           88  epoch            uint64   one aligned store, bumped before the first grant
           96  place            64 bytes where the pages are: UTF-8, padded with zeros; empty: in
                                         the file. The check covers it without the padding
          160  boot             16 bytes the boot of the machine, and the clocks, that times in
                                         headers count from

Everything but epoch and boot is written once, before the pool has its final name.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from pagemesh.wire.pool_format import FORMAT_VERSION, MAGIC, PLACE_BYTES_MAX, PoolFormat

EPOCH_OFFSET = 88
EPOCH_MAX = (1 << 16) - 1
"""The last epoch that there can be: a ledger sequence has 56 bits, 40 of them a counter."""
FIRST_EPOCHS = 1 << 15
"""A new pool starts at a random epoch below this, so that a late message about the previous pool is
not taken for one about this pool. At least as many restarts remain."""
_FIELDS = struct.Struct("<8sIIQQQQ32s")
_PLACE_OFFSET = 96
BOOT_OFFSET, BOOT_BYTES = 160, 16


@dataclass(frozen=True, slots=True)
class Superblock:
    """What a pool says about itself."""

    form: PoolFormat
    incarnation: int
    layout_digest: bytes
    group: int = 0

    @property
    def first_epoch(self) -> int:
        """The epoch at which this pool starts: as random as its incarnation."""
        return self.incarnation % FIRST_EPOCHS

    @property
    def place(self) -> str:
        """Where the pages are; see ``PoolFormat``."""
        return self.form.place

    def pack(self, epoch: int) -> bytes:
        """The bytes up to ``boot``, check included. Raises ``ValueError`` when the name of the
        place is too long."""
        form = self.form
        fields = _FIELDS.pack(
            MAGIC, FORMAT_VERSION, self.group, form.page_count, form.page_size, form.page_bytes,
            self.incarnation, self.layout_digest,
        )  # fmt: skip
        place = form.place.encode()
        if len(place) > PLACE_BYTES_MAX:
            raise ValueError(f"the place {form.place!r} has more than {PLACE_BYTES_MAX} bytes")
        words = fields + _check(fields, place) + epoch.to_bytes(8, "little")
        return words + place.ljust(PLACE_BYTES_MAX, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Superblock:
        """Raises ``ValueError`` with the reason when ``data`` is not a valid superblock."""
        fields, check = data[: _FIELDS.size], data[_FIELDS.size : _FIELDS.size + 8]
        place = data[_PLACE_OFFSET : _PLACE_OFFSET + PLACE_BYTES_MAX].rstrip(b"\0")
        if len(check) < 8 or fields[: len(MAGIC)] != MAGIC:
            raise ValueError("not a pool file")
        _, version, group, count, size, page_bytes, incarnation, digest = _FIELDS.unpack(fields)
        if version != FORMAT_VERSION:
            raise ValueError(f"pool format {version} is not {FORMAT_VERSION}")
        if check != _check(fields, place):
            raise ValueError("the superblock is damaged")
        form = PoolFormat(count, size, page_bytes, place.decode())
        return cls(form, incarnation, digest, group)


def _check(fields: bytes, place: bytes) -> bytes:
    return hashlib.sha256(fields + place).digest()[:8]
