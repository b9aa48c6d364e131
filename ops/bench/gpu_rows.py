"""Kernels over rows on a GPU, against plain torch in float32 on the same device."""

from __future__ import annotations

import torch
from ops.bench.gpu_rig import Item, Limits, Result, Rig, difference, share_wrong

from pagemesh.kernels.kv_codes import CODE_DTYPES, decode, encode
from pagemesh.kernels.layout import KvDtype

_EPSILON = 1e-6


def row_items(rig: Rig) -> dict[str, Item]:
    """The items, by name."""
    found: dict[str, Item] = {
        "rms_norm": lambda best: _rms_norm(rig, best),
        "add_rms_norm": lambda best: _add_rms_norm(rig, best),
        "silu_mul": lambda best: _silu_mul(rig, best),
        "rope": lambda best: _rope(rig, best),
    }
    for parts in (4, 32):
        found[f"merge_states {parts} parts"] = _merge_states(rig, parts)
    dtypes: tuple[KvDtype, ...] = ("int8", "e4m3")
    for dtype in dtypes:
        found[f"quantise {dtype}"] = _quantise(rig, dtype)
        found[f"dequantise {dtype}"] = _dequantise(rig, dtype)
    return found


def _rms_norm(rig: Rig, best: Limits) -> Result:
    from pagemesh.kernels.rms_norm import reference
    from pagemesh.kernels.rms_norm.triton import rms_norm

    x, weight = rig.rows(rig.size(8192, 4), 4096), rig.rows(4096)
    expected = reference.rms_norm(x.float(), weight.float(), _EPSILON)
    error = difference(rms_norm(x, weight, _EPSILON), expected)
    ms = rig.timed_ms(lambda: rms_norm(x, weight, _EPSILON))
    return Result(error, 0.01, ms, 2 * x.nbytes / ms * 1e3 / best.bandwidth_bytes)


def _add_rms_norm(rig: Rig, best: Limits) -> Result:
    from pagemesh.kernels.add_rms_norm import reference
    from pagemesh.kernels.add_rms_norm.triton import add_rms_norm

    rows = rig.size(8192, 4)
    x, addend, weight = rig.rows(rows, 4096), rig.rows(rows, 4096), rig.rows(4096)
    expected = reference.add_rms_norm(x.clone(), addend, weight, _EPSILON)
    error = difference(add_rms_norm(x.clone(), addend, weight, _EPSILON), expected)
    ms = rig.timed_ms(lambda: add_rms_norm(x, addend, weight, _EPSILON))
    return Result(error, 0.01, ms, 4 * x.nbytes / ms * 1e3 / best.bandwidth_bytes)


def _silu_mul(rig: Rig, best: Limits) -> Result:
    from pagemesh.kernels.silu_mul import reference
    from pagemesh.kernels.silu_mul.triton import silu_mul

    x = rig.rows(rig.size(8192, 4), 2 * 11008)
    error = difference(silu_mul(x), reference.silu_mul(x.float()))
    ms = rig.timed_ms(lambda: silu_mul(x))
    return Result(error, 0.01, ms, 1.5 * x.nbytes / ms * 1e3 / best.bandwidth_bytes)


def _rope(rig: Rig, best: Limits) -> Result:
    from pagemesh.kernels.rope import reference
    from pagemesh.kernels.rope.triton import rope

    rows = rig.size(8192, 4)
    x, turns = rig.rows(rows, 32, 128), 100 * torch.rand(rows, 64, device=rig.device)
    cosine, sine = turns.cos(), turns.sin()
    error = difference(rope(x.clone(), cosine, sine), reference.rope(x.float(), cosine, sine))
    ms = rig.timed_ms(lambda: rope(x, cosine, sine))
    moved_bytes = 2 * x.nbytes + cosine.nbytes + sine.nbytes
    return Result(error, 0.01, ms, moved_bytes / ms * 1e3 / best.bandwidth_bytes)


def _merge_states(rig: Rig, parts: int) -> Item:
    """Merging the spans of decode attention: 32 heads of 128; the last part of each row is
    empty."""

    def run(best: Limits) -> Result:
        from pagemesh.kernels.merge_states import reference
        from pagemesh.kernels.merge_states.triton import merge_states

        rows = rig.size(256, 2)
        states = rig.rows(rows, 32, parts, 128, dtype=torch.float32)
        lse = 5 * rig.rows(rows, 32, parts, dtype=torch.float32)
        lse[..., -1], states[..., -1, :] = float("-inf"), float("nan")
        error = difference(merge_states(states, lse), reference.merge_states(states, lse))
        ms = rig.timed_ms(lambda: merge_states(states, lse))
        read_bytes = (states.nbytes + lse.nbytes) * (parts - 1) // parts
        return Result(error, 1e-5, ms, read_bytes / ms * 1e3 / best.bandwidth_bytes)

    return run


def _quantise(rig: Rig, dtype: KvDtype) -> Item:
    def run(best: Limits) -> Result:
        from pagemesh.kernels.quantise.triton import quantise

        x = rig.rows(rig.size(1 << 16, 64), 128, dtype=torch.float32)
        codes, scales = quantise(x, CODE_DTYPES[dtype])
        # On the CPU: on a GPU, torch divides by a scalar by multiplying, which rounds differently.
        expected, expected_scales = encode(x.cpu(), dtype)
        assert expected_scales is not None
        error = share_wrong(codes.cpu().view(torch.int8), expected.view(torch.int8))
        error = max(error, share_wrong(scales.cpu(), expected_scales))
        ms = rig.timed_ms(lambda: quantise(x, CODE_DTYPES[dtype]))
        moved_bytes = x.nbytes + codes.nbytes + scales.nbytes
        return Result(error, 0.0, ms, moved_bytes / ms * 1e3 / best.bandwidth_bytes)

    return run


def _dequantise(rig: Rig, dtype: KvDtype) -> Item:
    def run(best: Limits) -> Result:
        from pagemesh.kernels.quantise.triton import dequantise

        codes, scales = encode(rig.rows(rig.size(1 << 16, 64), 128, dtype=torch.float32), dtype)
        assert scales is not None
        error = share_wrong(dequantise(codes, scales), decode(codes, scales))
        ms = rig.timed_ms(lambda: dequantise(codes, scales))
        moved_bytes = 5 * codes.nbytes + scales.nbytes
        return Result(error, 0.0, ms, moved_bytes / ms * 1e3 / best.bandwidth_bytes)

    return run
