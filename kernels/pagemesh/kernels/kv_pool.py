"""The pages of a pool as the kernels and torch see them."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from pagemesh.kernels.kv_codes import CODE_DTYPES
from pagemesh.kernels.layout import KV_DTYPES, PAGE_ALIGN_BYTES, SCALE_BYTES, PageLayout
from pagemesh.kernels.native.library import PagesStruct


class KvPool:
    """Pages of one layout over memory that the pool does not own (usually a mapped pool file).

    ``memory``: uint8 ``[page_count * page_bytes]``, writable; it is kept alive by the views.
    Kernels mutate it in place. Raises ``ValueError`` when its size is not whole pages.
    """

    def __init__(self, layout: PageLayout, memory: NDArray[np.uint8] | torch.Tensor) -> None:
        """``memory`` may be a tensor on a device; the native library only takes host memory."""
        if isinstance(memory, np.ndarray):
            if not memory.flags.writeable:
                raise ValueError("a pool takes writable memory")
            memory = torch.from_numpy(memory)
        if memory.ndim != 1 or memory.dtype != torch.uint8 or not memory.is_contiguous():
            raise ValueError("a pool takes contiguous uint8 memory of one dimension")
        if memory.nbytes % layout.page_bytes:
            raise ValueError(
                f"{memory.nbytes} bytes are not whole pages of {layout.page_bytes} bytes"
            )
        self.layout = layout
        self.page_count = memory.nbytes // layout.page_bytes
        self.memory = memory
        self.address = self.memory.data_ptr()
        codes = self.memory.view(CODE_DTYPES[layout.dtype])
        self._keys = [self._keys_of(codes, layer) for layer in range(layout.layers)]
        self._values = [self._values_of(codes, layer) for layer in range(layout.layers)]
        self._structs = [self._struct_of(layer) for layer in range(layout.layers)]
        self.structs = [ctypes.byref(struct) for struct in self._structs]
        """One C view per layer, to pass to the native library."""
        pointers = [ctypes.addressof(struct) for struct in self._structs]
        self.layer_pointers = (ctypes.c_void_p * layout.layers)(*pointers)
        """Pointers to all of them, for operations that go through all layers."""

    @classmethod
    def allocate(cls, layout: PageLayout, page_count: int) -> KvPool:
        """A pool in private memory, zeroed (tests, benchmarks, offline use)."""
        size = page_count * layout.page_bytes
        whole = np.zeros(size + PAGE_ALIGN_BYTES, np.uint8)
        start = -whole.__array_interface__["data"][0] % PAGE_ALIGN_BYTES
        return cls(layout, whole[start : start + size])

    def keys(self, layer: int) -> torch.Tensor:
        """K of ``layer``: view ``[page_count, kv_heads, head_dim, page_size]`` in the layout's
        dtype."""
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        """V of ``layer``: view ``[page_count, kv_heads, page_size, head_dim]`` in the layout's
        dtype."""
        return self._values[layer]

    def key_scales(self, layer: int) -> torch.Tensor:
        """Scales of K of ``layer``: float32 view ``[page_count, kv_heads, page_size]``.
        Raises ``ValueError`` for a dtype without scales."""
        return self._scales_of(layer, 0)

    def value_scales(self, layer: int) -> torch.Tensor:
        """Scales of V of ``layer``; like ``key_scales``."""
        return self._scales_of(layer, self.layout.value_offset)

    def _scales_of(self, layer: int, codes_offset: int) -> torch.Tensor:
        at = self.layout
        if not at.is_scaled:
            raise ValueError(f"{at.dtype} has no scales")
        start_bytes = (layer * at.layer_stride + codes_offset) * at.item_bytes
        head_words = at.head_stride * at.item_bytes // SCALE_BYTES
        return self.memory.view(torch.float32).as_strided(
            (self.page_count, at.kv_heads, at.page_size),
            (at.page_bytes // SCALE_BYTES, head_words, 1),
            (start_bytes + at.scale_offset_bytes) // SCALE_BYTES,
        )

    def _keys_of(self, codes: torch.Tensor, layer: int) -> torch.Tensor:
        at = self.layout
        return codes.as_strided(
            (self.page_count, at.kv_heads, at.head_dim, at.page_size),
            (at.page_stride, at.head_stride, at.page_size, 1),
            layer * at.layer_stride,
        )

    def _values_of(self, codes: torch.Tensor, layer: int) -> torch.Tensor:
        at = self.layout
        return codes.as_strided(
            (self.page_count, at.kv_heads, at.page_size, at.head_dim),
            (at.page_stride, at.head_stride, at.head_dim, 1),
            layer * at.layer_stride + at.value_offset,
        )

    def _struct_of(self, layer: int) -> PagesStruct:
        at = self.layout
        return PagesStruct(
            base=self.address + layer * at.layer_stride * at.item_bytes,
            page_stride=at.page_stride,
            value_offset=at.value_offset,
            head_stride=at.head_stride,
            page_count=self.page_count,
            page_size=at.page_size,
            kv_heads=at.kv_heads,
            head_dim=at.head_dim,
            kv_type=KV_DTYPES.index(at.dtype),
            scale_offset_bytes=at.scale_offset_bytes,
        )
