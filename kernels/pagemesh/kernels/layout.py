"""What lies where in a page: defined once, here.

A page is one contiguous record of ``page_size`` slots for every layer of its group:

    page = [layer][kv_head][K then V]      K of a head: [head_dim][slot]   (transposed)
                                           V of a head: [slot][head_dim]

so one page is one transfer, one checksum and one disk record, a head's K and V are one run of
bytes, and the scores of sixteen slots are one vector. The alternatives were measured in
``ops/adr/0001-page-layout.md``.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Literal

from pagemesh.wire.identity import canonical

KvDtype = Literal["float32"]
_ITEM_BYTES: dict[KvDtype, int] = {"float32": 4}
PAGE_ALIGN_BYTES = 64
HEAD_DIM_MAX = 512
LAYOUT_VERSION = 1


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The shape of a page. Two pools with equal ``digest`` are interchangeable byte for byte.

    ``page_size`` is in slots. Raises ``ValueError`` for shapes that no kernel takes.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: KvDtype = "float32"
    group: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, at least 1 is needed")
        if self.head_dim > HEAD_DIM_MAX:
            raise ValueError(f"head_dim is {self.head_dim}, at most {HEAD_DIM_MAX} is supported")

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @property
    def value_offset(self) -> int:
        """Elements from a head's K to its V."""
        return self.head_dim * self.page_size

    @property
    def head_stride(self) -> int:
        """Elements from a KV head to the next, for K and V alike."""
        return 2 * self.value_offset

    @property
    def layer_stride(self) -> int:
        """Elements from a layer to the next."""
        return self.kv_heads * self.head_stride

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, padded so that every page starts on a cache line."""
        used = self.layers * self.layer_stride * self.item_bytes
        return -(-used // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES

    @property
    def page_stride(self) -> int:
        """Elements from a page to the next."""
        return self.page_bytes // self.item_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V one token takes."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.item_bytes

    @property
    def digest(self) -> bytes:
        """32 bytes that name this layout in handles, pools and identities."""
        return _digest(self)


@functools.cache
def _digest(layout: PageLayout) -> bytes:
    fields = canonical(
        {
            "version": LAYOUT_VERSION,
            "record": "page[layer][head][kv];k[dim][slot];v[slot][dim]",
            "layers": layout.layers,
            "kv_heads": layout.kv_heads,
            "head_dim": layout.head_dim,
            "page_size": layout.page_size,
            "dtype": layout.dtype,
            "group": layout.group,
        }
    )
    return hashlib.sha256(fields).digest()
