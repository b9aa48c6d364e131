"""``quantise`` and ``dequantise`` on a GPU, and the pieces other kernels take from them.

e4m3 is stored and read as its byte, by integer arithmetic: that runs on every architecture
(sm_80 has no instruction for it) and in the interpreter. Where a byte is read at memory speed
(attention), the instruction is used from sm_89 on.

    e4m3 byte  s eeee mmm, bias 7      normal: 2 ** (e - 7) * (1 + m / 8), at least 2 ** -6
                                       subnormal: m * 2 ** -9
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemesh.kernels.triton_support import expect_device, power_of_two, warps_of

INT8_TOP = tl.constexpr(127.0)
E4M3_TOP = tl.constexpr(448.0)
_NORMAL_MIN = tl.constexpr(2.0**-6)
_SUBNORMALS = tl.constexpr(2.0**9)
_TO_EVEN = tl.constexpr(1.5 * 2.0**23)
_HALF_BIASES = tl.constexpr(2.0**8)
"""float16 has bias 15, e4m3 has 7."""


@triton.jit
def round_even(x):
    """float32 ``x``, below 2 ** 22 in magnitude, to the nearest integer, ties to even: where
    float32 has no room for a fraction, adding rounds."""
    return (x + _TO_EVEN) - _TO_EVEN


@triton.jit
def to_int8(x):
    """float32 in -127 .. 127 to int8."""
    return round_even(x).to(tl.int32).to(tl.int8)


@triton.jit
def to_e4m3(x):
    """float32 in -448 .. 448 to the byte of the nearest e4m3 value, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.abs(x)
    # The upper four bits of the exponent's sum and three of the mantissa, rounded at bit 20;
    # a mantissa that rounds over carries into the exponent, as it should.
    raw = size.to(tl.int32, bitcast=True)
    normal = ((raw + 0x7FFFF + ((raw >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = round_even(size * _SUBNORMALS).to(tl.int32)
    code = tl.where(size < _NORMAL_MIN, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_e4m3(byte):
    """The float16 value, exact, of an e4m3 byte that is no NaN: its exponent and mantissa moved
    to where float16 has them, and the bias made good (which also lifts subnormals)."""
    wide = byte.to(tl.int16)
    moved = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return moved.to(tl.float16, bitcast=True) * _HALF_BIASES


@triton.jit
def _quantise_rows(x, values, scales, width, x_stride, block: tl.constexpr, int8: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    own = tl.load(x + row * x_stride + at, mask=at < width, other=0.0).to(tl.float32)
    top: tl.constexpr = INT8_TOP if int8 else E4M3_TOP
    scale = tl.max(tl.abs(own), 0) / top
    scaled = own * tl.where(scale > 0, 1.0 / scale, 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -top), top)
    tl.store(scales + row, scale)
    out = values + row * width + at
    if int8:
        tl.store(out, to_int8(scaled), mask=at < width)
    else:
        tl.store(out, to_e4m3(scaled), mask=at < width)


@triton.jit
def _dequantise_rows(values, scales, out, width, block: tl.constexpr, int8: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    byte = tl.load(values + row * width + at, mask=at < width, other=0)
    own = byte.to(tl.float32) if int8 else from_e4m3(byte).to(tl.float32)
    tl.store(out + row * width + at, own * tl.load(scales + row), mask=at < width)


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package."""
    expect_device("x", x)
    rows, width = x.shape
    values = torch.empty((rows, width), dtype=dtype, device=x.device)
    scales = torch.zeros(rows, dtype=torch.float32, device=x.device)
    if x.numel():
        block = power_of_two(width)
        _quantise_rows[(rows,)](
            x, _bytes_of(values), scales, width, x.stride(0), block, dtype is torch.int8,
            num_warps=warps_of(block),
        )  # fmt: skip
    return values, scales


def dequantise(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """See the package."""
    expect_device("values", values)
    rows, width = values.shape
    out = torch.empty((rows, width), dtype=torch.float32, device=values.device)
    if values.numel():
        block = power_of_two(width)
        _dequantise_rows[(rows,)](
            _bytes_of(values), scales, out, width, block, values.dtype is torch.int8,
            num_warps=warps_of(block),
        )  # fmt: skip
    return out


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    """int8 as it is, e4m3 as its bytes."""
    return values if values.dtype is torch.int8 else values.view(torch.uint8)
