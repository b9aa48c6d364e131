"""What the Triton backends share: how a kernel sees a page, and checks of launch arguments.

Only modules named ``triton`` import this one, and those are imported only once a GPU (or, with the
interpreter, a test) needs them: on a CPU Triton is not required.

The interpreter (``TRITON_INTERPRET=1``, tensors on a CPU) computes bfloat16 wrongly, so there
every value becomes float32 right after it is loaded, and products are computed in float32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagemesh.kernels.dispatch import check_heads
from pagemesh.kernels.kv_pool import KvPool
from pagemesh.kernels.layout import PageLayout

ROW_TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types that activations may have."""
DOT_SIDE_MIN = 16
"""The smallest side of a tile that a matrix instruction takes."""
_TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@dataclass(frozen=True, slots=True)
class PageShape:
    """A layer of a page, as a compile-time constant of a kernel. Strides are in elements.

    K[page, head, d, slot] = base + page * page_stride + head * head_stride
                             + d * page_size + slot
    V[page, head, slot, d] = the same + value_offset - d * page_size - slot
                             + slot * head_dim + d
    """

    page_size: int
    head_dim: int
    kv_heads: int
    page_stride: int
    head_stride: int
    value_offset: int
    scale_offset: int
    """Elements (bytes) from codes of K, or of V, to their float32 scales, one per slot."""
    kind: str
    """``float``; or ``int8``, ``e4m3`` (by integer arithmetic) or ``e4m3_native`` (by the
    instructions of sm_89 and later) for codes with scales."""
    block_dim: int
    """``head_dim`` rounded up to a power of two that a matrix instruction takes."""


def page_shape(layout: PageLayout) -> PageShape:
    """The shape that kernels over pages of ``layout`` are compiled for."""
    return _page_shape(layout, has_e4m3())


@functools.cache
def _page_shape(layout: PageLayout, native: bool) -> PageShape:
    kind: str = layout.dtype if layout.is_scaled else "float"
    return PageShape(
        page_size=layout.page_size,
        head_dim=layout.head_dim,
        kv_heads=layout.kv_heads,
        page_stride=layout.page_stride,
        head_stride=layout.head_stride,
        value_offset=layout.value_offset,
        scale_offset=layout.scale_offset_bytes,
        kind="e4m3_native" if kind == "e4m3" and native else kind,
        block_dim=max(DOT_SIDE_MIN, triton.next_power_of_2(layout.head_dim)),
    )


def has_e4m3() -> bool:
    """Whether the device that kernels run on has instructions that convert e4m3."""
    return _architecture() >= 89


def has_wide_products() -> bool:
    """Whether four warps of the device can together compute a product from shared memory."""
    return _architecture() == 90


@functools.cache  # asked for at every launch, and slow to look up
def _architecture() -> int:
    """90 for sm_90; 0 in the interpreter."""
    return 0 if is_interpreted() else triton.runtime.driver.active.get_current_target().arch


def elements_to_read(pool: KvPool, layer: int) -> torch.Tensor:
    """The pool's elements from the first of ``layer`` in page 0 on, one dimension; e4m3 as
    bytes where the device has no instructions for it."""
    elements = pool.keys(layer).as_strided((1,), (1,))
    return elements if has_e4m3() else _without_e4m3(elements)


def elements_to_write(pool: KvPool, layer: int) -> torch.Tensor:
    """Like ``elements_to_read``, but e4m3 always as bytes: kernels round to it themselves, so that
    it is the same everywhere."""
    return _without_e4m3(pool.keys(layer).as_strided((1,), (1,)))


def _without_e4m3(elements: torch.Tensor) -> torch.Tensor:
    return elements.view(torch.uint8) if elements.dtype is torch.float8_e4m3fn else elements


@functools.cache
def is_interpreted() -> bool:
    """Whether kernels run in the interpreter, on a CPU."""
    return bool(triton.knobs.runtime.interpret)


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """The type in which products of ``dtype`` elements are computed."""
    return tl.float32 if is_interpreted() else _TRITON_TYPES[dtype]


def warps_of(block: int) -> int:
    """Warps for a program that holds one row of ``block`` elements."""
    return min(max(block // 512, 1), 8)


def expect_rows(name: str, rows: torch.Tensor, *, width: int) -> None:
    """Raises ``ValueError`` unless ``rows`` is a float tensor ``[rows, width]`` whose rows are
    contiguous, on the device the kernels run on."""
    fits = rows.dim() == 2 and rows.shape[1] == width and rows.dtype in ROW_TYPES
    if not fits or (width > 1 and rows.stride(1) != 1):
        raise ValueError(
            f"{name}: expected float [rows, {width}] with contiguous rows, got {rows.dtype} "
            f"{list(rows.shape)} stride {list(rows.stride())}"
        )
    expect_device(name, rows)


def expect_heads(name: str, rows: torch.Tensor, *, rows_count: int, head_dim: int) -> None:
    """Raises ``ValueError`` unless ``rows`` is a float tensor ``[rows_count, heads, head_dim]``
    with contiguous heads, at any row stride, on the device the kernels run on."""
    check_heads(name, rows, rows_count=rows_count, head_dim=head_dim, dtypes=ROW_TYPES)
    expect_device(name, rows)


def expect_integers(name: str, values: torch.Tensor, dtype: torch.dtype, count: int) -> None:
    """Raises ``ValueError`` unless ``values`` is contiguous ``dtype`` ``[count]``."""
    if values.dtype is not dtype or values.shape != (count,) or not values.is_contiguous():
        raise ValueError(
            f"{name}: expected contiguous {dtype} [{count}], got {values.dtype} "
            f"{list(values.shape)}"
        )
    expect_device(name, values)


def expect_device(name: str, tensor: torch.Tensor) -> None:
    """Raises ``ValueError`` for a tensor that a kernel cannot reach."""
    if tensor.device.type != device_type():
        raise ValueError(f"{name}: expected a {device_type()} tensor, got one on {tensor.device}")


def device_type() -> str:
    """Where tensors must be for a kernel to reach them."""
    return "cpu" if is_interpreted() else "cuda"
