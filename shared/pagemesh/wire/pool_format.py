"""The layout of the pool file, on which pager and workers agree.

    superblock | root table | revocation table | header table | pages
    4 KiB        32 + 8 bytes  8 bytes a lease    header_bytes   page_bytes each
                 a root        slot               a page

Pages that are on a device are not in the file, which then ends with the header table; the
superblock says where they are. Every section starts on a 4 KiB boundary. Only the pager writes
the first four sections; a page's bytes are written by the one holder of its write right.

A header is ``8 + page_size / 2`` words of 8 bytes (128 bytes at page size 16):

    word 0   state (top 8 bits) and ledger sequence (low 56 bits): one aligned store
    word 1   page identity, kept when the content changes tier
    word 2   identity of the parent page, 0 under the root
    word 3   incarnation of the writer
    word 4   root index (low 32 bits), token count (high 32 bits)
    word 5   checksum of the page's bytes, 0: none
    word 6   time at which a committed page expires: milliseconds (low 48 bits) and a check of them
             with the identity (high 16 bits); 0: never
    word 7   check word over words 1 to 5, whether word 6 is 0, and the tokens
    word 8.. token ids, uint32 each

A header is written in the order INVALID, body, check word, state (release); see the native
library. While a header stays valid, only word 6 of its body is ever replaced: in one store, by a
later time. That time is CLOCK_BOOTTIME, which all processes of a host share and nobody can set,
since the boot of the machine that the superblock names.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

MAGIC = b"PMPOOL01"
FORMAT_VERSION = 2
UNTIL_BITS = 48
UNTIL_FOREVER_MS = (1 << UNTIL_BITS) - 1
"""Expiry time of a page that had one and is now to be kept for good."""
SECTION_ALIGN = 4096
SUPERBLOCK_BYTES = 4096
ROOT_COUNT_MAX = 1024
ROOT_ENTRY_BYTES = 40
LEASE_SLOT_COUNT_MAX = 16_384
SEQUENCE_BITS = 56
SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1
EPOCH_SHIFT = 40
"""Ledger sequence = epoch << 40 | counter, so it never goes backwards as long as epochs do not."""
LOCK_PREFIX, LOCK_SUFFIX = "worker-", ".lock"
"""How the names of workers' lock files begin and end."""
POOL_SUFFIX = ".pool"
PINS_SUFFIX = ".pins"
RETIRED_SUFFIX = ".retired"
HOLDERS_SUFFIX = ".holders"
MEMORY_SUFFIX = ".memory"
"""For the socket beside a worker's lock file that hands over the memory of a device's pool."""
IN_FILE = ""
"""The ``place`` of pages that are in the pool file; other places name devices."""
PLACE_BYTES_MAX = 64
"""Longest name of a place, in UTF-8."""


class HeaderState(enum.IntEnum):
    """States as stored in a header. FREE is 0, so that a fresh file is all free pages."""

    FREE = 0
    INVALID = 1
    HELD = 2
    COMMITTED = 3
    DRAINING = 4


def _aligned(value: int) -> int:
    return -(-value // SECTION_ALIGN) * SECTION_ALIGN


@dataclass(frozen=True, slots=True)
class PoolFormat:
    """Offsets in bytes of a pool of ``page_count`` pages of ``page_bytes`` each."""

    page_count: int
    page_size: int
    page_bytes: int
    place: str = IN_FILE
    """Where the pages are."""

    @property
    def all_pages_bytes(self) -> int:
        """Size of all pages, in the file or on a device."""
        return self.page_count * self.page_bytes

    @property
    def header_bytes(self) -> int:
        return 64 + 4 * (self.page_size + self.page_size % 2)

    @property
    def header_words(self) -> int:
        return self.header_bytes // 8

    @property
    def roots_offset(self) -> int:
        return SUPERBLOCK_BYTES

    @property
    def revocation_offset(self) -> int:
        return _aligned(self.roots_offset + ROOT_COUNT_MAX * ROOT_ENTRY_BYTES)

    @property
    def headers_offset(self) -> int:
        return _aligned(self.revocation_offset + 8 * LEASE_SLOT_COUNT_MAX)

    @property
    def pages_offset(self) -> int:
        return _aligned(self.headers_offset + self.page_count * self.header_bytes)

    @property
    def file_bytes(self) -> int:
        if self.place != IN_FILE:
            return self.pages_offset
        return _aligned(self.pages_offset + self.all_pages_bytes)
