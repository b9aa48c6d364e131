"""``quantise`` and ``dequantise`` on a GPU, and codes and scales for the kernels over pages.

e4m3 is stored and read as its byte, by integer arithmetic: that runs on every architecture
(sm_80 has no instruction for it) and in the interpreter. Attention, which reads bytes at memory
speed, uses the instruction from sm_89 on.

    e4m3 byte  s eeee mmm, bias 7      normal: 2 ** (e - 7) * (1 + m / 8), at least 2 ** -6
                                       subnormal: m * 2 ** -9
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemesh.kernels.triton_support import expect_device, expect_rows, warps_of

INT8_TOP = tl.constexpr(127.0)
E4M3_TOP = tl.constexpr(448.0)
_NORMAL_MIN = tl.constexpr(2.0**-6)
_SUBNORMALS = tl.constexpr(2.0**9)
_TO_EVEN = tl.constexpr(1.5 * 2.0**23)
_HALF_BIASES = tl.constexpr(2.0**8)
"""float16 has bias 15, e4m3 has 7."""


@triton.jit
def round_even(x):
    """float32 ``x``, below 2 ** 22 in magnitude, to the nearest integer, ties to even: a sum so
    large that float32 has no bits left for a fraction is rounded to an integer."""
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
    # The exponent, with the bias changed, and three bits of the mantissa, rounded at bit 20; a
    # mantissa that overflows when rounded carries into the exponent, as it should.
    raw = size.to(tl.int32, bitcast=True)
    normal = ((raw + 0x7FFFF + ((raw >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = round_even(size * _SUBNORMALS).to(tl.int32)
    code = tl.where(size < _NORMAL_MIN, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_e4m3(byte):
    """The exact float16 value of an e4m3 byte that is not NaN: exponent and mantissa are moved to
    where float16 has them, and a product corrects the bias (for subnormals, too)."""
    wide = byte.to(tl.int16)
    moved = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return moved.to(tl.float16, bitcast=True) * _HALF_BIASES


@triton.jit
def largest_of(x):
    """The largest magnitude of a block; infinite if there is a NaN."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), 0)


@triton.jit
def scale_of(largest, kind: tl.constexpr):
    """The scale of a row whose largest magnitude is ``largest``; NaN for infinity."""
    top: tl.constexpr = INT8_TOP if kind == "int8" else E4M3_TOP
    scale = tl.div_rn(largest, top)
    return tl.where(largest < float("inf"), scale, float("nan"))


@triton.jit
def codes_of(x, scale, kind: tl.constexpr):
    """float32 ``x`` as codes, int8 or the bytes of e4m3; 0 where the scale is 0 or NaN."""
    top: tl.constexpr = INT8_TOP if kind == "int8" else E4M3_TOP
    usable = scale > 0
    divided = tl.div_rn(x, tl.where(usable, scale, 1.0) + tl.zeros_like(x))
    bounded = tl.minimum(tl.maximum(divided, -top), top)
    bounded = tl.where(usable, bounded, 0.0)
    if kind == "int8":
        return to_int8(bounded)
    else:
        return to_e4m3(bounded)


@triton.jit
def numbers_of(codes, kind: tl.constexpr):
    """The unscaled values of ``codes``, in a float type that holds them exactly."""
    if kind == "e4m3":
        return from_e4m3(codes)
    elif kind == "int8":
        return codes.to(tl.float16)
    else:
        return codes


@triton.jit
def _quantise_rows(x, codes, scales, width, x_stride, block: tl.constexpr, kind: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    own = tl.load(x + row * x_stride + at, mask=at < width, other=0.0).to(tl.float32)
    scale = scale_of(largest_of(own), kind)
    tl.store(scales + row, scale)
    tl.store(codes + row * width + at, codes_of(own, scale, kind), mask=at < width)


@triton.jit
def _dequantise_rows(codes, scales, out, width, block: tl.constexpr, kind: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    own = numbers_of(tl.load(codes + row * width + at, mask=at < width, other=0), kind)
    scaled = own.to(tl.float32) * tl.load(scales + row)
    tl.store(out + row * width + at, scaled, mask=at < width)


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of type ``dtype`` and scales; see the package. Raises ``ValueError`` for a wrong
    shape or type."""
    rows, width = x.shape
    expect_rows("x", x, width=width)
    codes = torch.empty((rows, width), dtype=dtype, device=x.device)
    scales = torch.zeros(rows, dtype=torch.float32, device=x.device)
    kind = _kind(codes)
    if x.numel():
        block = triton.next_power_of_2(width)
        _quantise_rows[(rows,)](
            x, _bytes_of(codes), scales, width, x.stride(0), block, kind,
            num_warps=warps_of(block),
        )  # fmt: skip
    return codes, scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [rows, width]; see the package. Raises ``ValueError`` for a wrong type."""
    expect_device("codes", codes)
    rows, width = codes.shape
    kind = _kind(codes)
    out = torch.empty((rows, width), dtype=torch.float32, device=codes.device)
    if codes.numel():
        block = triton.next_power_of_2(width)
        _dequantise_rows[(rows,)](
            _bytes_of(codes), scales, out, width, block, kind, num_warps=warps_of(block)
        )
    return out


def _kind(codes: torch.Tensor) -> str:
    kinds = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}
    if codes.dtype not in kinds or not codes.is_contiguous():
        raise ValueError(f"codes: expected contiguous int8 or float8_e4m3fn, got {codes.dtype}")
    return kinds[codes.dtype]


def _bytes_of(codes: torch.Tensor) -> torch.Tensor:
    """int8 as it is, e4m3 as its bytes."""
    return codes if codes.dtype is torch.int8 else codes.view(torch.uint8)
