"""The layout of a page: defined once, here.

A page is one contiguous record of ``page_size`` slots for every layer of its group:

    page = [layer][kv_head][K then V]      K of a head: [head_dim][slot]   (transposed)
                                           V of a head: [slot][head_dim]

so one page is one transfer, one checksum and one disk record, a head's K and V are one run of
bytes, and the scores of sixteen slots are one vector. The alternatives were measured in
``ops/adr/0001-page-layout.md``.

``int8`` and ``e4m3`` pages hold codes and, after a head's codes of K and after those of V, one
float32 scale per slot: value = code * scale (``kv_codes``). Scales start on a multiple of 4 bytes:

    K of a head: [head_dim][slot] codes, padding, [slot] scales      V of a head: likewise

All offsets and strides except ``scale_offset_bytes`` are in elements, whatever the dtype.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Literal, get_args

from pagemesh.wire.identity import canonical

KvDtype = Literal["float32", "float16", "bfloat16", "int8", "e4m3"]
"""``e4m3``: 8-bit floats of 4 exponent and 3 mantissa bits, without infinities (OCP)."""
KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)
"""In the native library's order (``PmKvType``)."""
_ITEM_BYTES: dict[KvDtype, int] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "e4m3": 1,
}  # fmt: skip
SCALED_DTYPES: frozenset[KvDtype] = frozenset({"int8", "e4m3"})
SCALE_BYTES = 4
PAGE_ALIGN_BYTES = 64
HEAD_DIM_MAX = 512
LAYOUT_VERSION = 1


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The shape of a page. Two pools with equal ``digest`` are interchangeable byte for byte.

    ``page_size`` is in slots. Raises ``ValueError`` for shapes and dtypes that no kernel takes.
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
        if self.dtype not in KV_DTYPES:
            raise ValueError(f"dtype is {self.dtype}, not one of {', '.join(KV_DTYPES)}")

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @property
    def is_scaled(self) -> bool:
        """Whether every slot and head has a scale for K and one for V."""
        return self.dtype in SCALED_DTYPES

    @property
    def scale_offset_bytes(self) -> int:
        """Bytes from the first code of a head's K to its scales, and of its V likewise."""
        used = self.head_dim * self.page_size * self.item_bytes
        return -(-used // SCALE_BYTES) * SCALE_BYTES

    @property
    def value_offset(self) -> int:
        """Elements from a head's K to its V."""
        if not self.is_scaled:
            return self.head_dim * self.page_size
        return (self.scale_offset_bytes + SCALE_BYTES * self.page_size) // self.item_bytes

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
        """Bytes of K and V one token takes, scales included."""
        row_bytes = self.head_dim * self.item_bytes + (SCALE_BYTES if self.is_scaled else 0)
        return self.layers * 2 * self.kv_heads * row_bytes

    @property
    def digest(self) -> bytes:
        """32 bytes that name this layout in handles, pools and identities."""
        return _digest(self)


_RECORD = "page[layer][head][kv];k[dim][slot];v[slot][dim]"
_SCALED_RECORD = f"{_RECORD};scales[slot] float32 after k and after v"


@functools.cache
def _digest(layout: PageLayout) -> bytes:
    fields = canonical(
        {
            "version": LAYOUT_VERSION,
            "record": _SCALED_RECORD if layout.is_scaled else _RECORD,
            "layers": layout.layers,
            "kv_heads": layout.kv_heads,
            "head_dim": layout.head_dim,
            "page_size": layout.page_size,
            "dtype": layout.dtype,
            "group": layout.group,
        }
    )
    return hashlib.sha256(fields).digest()
