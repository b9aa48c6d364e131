"""What ``ops.bench.gpu`` runs: each item checks its numbers, then takes its time."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from pagemesh.engine.cuda.decoder import CudaDecoder
from pagemesh.engine.cuda.device import CudaMaker
from pagemesh.engine.cuda.weights import Dense, DeviceLayer, DeviceWeights
from pagemesh.engine.device_memory import MemoryMaker, PageMover
from pagemesh.engine.model import DecoderConfig, Rope
from pagemesh.kernels.batch import RaggedBatch
from pagemesh.kernels.layout import KvDtype
from pagemesh.kernels.ops import KvPool, PageLayout, ragged_batch
from pagemesh.wire.pool_memory import Direction, MovePages
from pagemesh.wire.tokens import pack_extents

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
SCALE = HEAD_DIM**-0.5
Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Limits:
    """The device's own, measured in the same run: bytes moved and operations done a second."""

    bandwidth_bytes: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """``error``: largest difference from the reference over its largest value. ``beside_ms``:
    torch's own way to the same, 0 where there is none."""

    error: float
    error_max: float
    time_ms: float
    bandwidth_fraction: float = 0.0
    flops_fraction: float = 0.0
    beside_ms: float = 0.0

    def line(self) -> dict[str, object]:
        """For the report."""
        return {
            "ok": self.error <= self.error_max,
            "error": float(f"{self.error:.2g}"),
            "ms": round(self.time_ms, 4),
            "of_bandwidth": round(self.bandwidth_fraction, 3),
            "of_arithmetic": round(self.flops_fraction, 3),
            "torch_ms": round(self.beside_ms, 4),
        }


Item = Callable[[Limits], Result]


def items() -> dict[str, Item]:
    """Every item by name."""
    found: dict[str, Item] = {}
    dtypes: tuple[KvDtype, ...] = ("bfloat16", "int8", "e4m3")
    for dtype in dtypes:
        for batch, context in ((1, 8192), (8, 8192), (64, 1024), (256, 512)):
            name = f"decode attention {dtype} batch {batch} context {context}"
            found[name] = _decode(dtype, batch, context)
        for past, rows in ((0, 2048), (8192, 512)):
            found[f"prefill attention {dtype} past {past} rows {rows}"] = _prefill(
                dtype, past, rows
            )
        found[f"kv_write {dtype}"] = _kv_write(dtype)
    found["page_copy"] = _page_copy
    found["pages moved out of the pool and in"] = moved
    found["rms_norm"] = _rms_norm
    found["add_rms_norm"] = _add_rms_norm
    found["silu_mul"] = _silu_mul
    for batch in (1, 16, 64):
        found[f"decode step batch {batch}, graphs against none"] = _step(batch)
    return found


def device_pool(dtype: KvDtype, pages: int, layers: int = 1) -> KvPool:
    layout = PageLayout(layers, KV_HEADS, HEAD_DIM, PAGE_SIZE, dtype)
    memory = torch.zeros(pages * layout.page_bytes, dtype=torch.uint8, device="cuda")
    return KvPool(layout, memory)


def on_device(batch: RaggedBatch) -> RaggedBatch:
    return RaggedBatch(*(getattr(batch, field.name).cuda() for field in fields(batch)))


def filled(dtype: KvDtype, sequences: int, past: int, rows: int) -> tuple[KvPool, RaggedBatch]:
    """A pool with K and V of every slot, and a batch of ``rows`` after ``past`` tokens each."""
    from pagemesh.kernels.kv_write.triton import kv_write

    each = -(-(past + rows) // PAGE_SIZE)
    pool = device_pool(dtype, sequences * each)
    slots = torch.arange(pool.page_count * PAGE_SIZE, device="cuda")
    for part in torch.split(slots, 1 << 16):
        shape = (len(part), KV_HEADS, HEAD_DIM)
        k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        kv_write(k, v, pool, 0, part)
    order = np.random.default_rng(0).permutation(pool.page_count).astype(np.uint32)
    tables = [order[i * each : (i + 1) * each] for i in range(sequences)]
    return pool, ragged_batch(tables, [past] * sequences, [rows] * sequences, PAGE_SIZE)


def contiguous(pool: KvPool, batch: RaggedBatch, sequences: int, count: int) -> tuple[Tensor, ...]:
    """K and V, bfloat16 [sequences, kv_heads, count, head_dim], decoded and gathered."""
    pages = batch.tables.long().cuda().view(sequences, -1)
    k = pool.keys(0)[pages].float().permute(0, 2, 1, 4, 3).flatten(2, 3)
    v = pool.values(0)[pages].float().permute(0, 2, 1, 3, 4).flatten(2, 3)
    if pool.layout.is_scaled:
        k *= pool.key_scales(0)[pages].permute(0, 2, 1, 3).flatten(2, 3).unsqueeze(-1)
        v *= pool.value_scales(0)[pages].permute(0, 2, 1, 3).flatten(2, 3).unsqueeze(-1)
    return k[:, :, :count].bfloat16(), v[:, :, :count].bfloat16()


def difference(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).abs().max() / expected.float().abs().max())


def timed_ms(job: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(job))


def _decode(dtype: KvDtype, sequences: int, context: int) -> Item:
    def run(best: Limits) -> Result:
        from pagemesh.kernels.paged_attention.triton import paged_attention, span_count

        pool, batch = filled(dtype, sequences, context - 1, 1)
        own, spans = on_device(batch), span_count(context)
        q = torch.randn(sequences, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        k, v = contiguous(pool, batch, sequences, context)

        def by_torch() -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                q.unsqueeze(2), k, v, scale=SCALE, enable_gqa=True
            ).squeeze(2)

        got = paged_attention(q, pool, 0, own, SCALE, spans=spans)
        ms = timed_ms(lambda: paged_attention(q, pool, 0, own, SCALE, spans=spans))
        read_bytes = sequences * context * pool.layout.token_bytes
        return Result(
            difference(got, by_torch()), 0.03, ms,
            bandwidth_fraction=read_bytes / ms * 1e3 / best.bandwidth_bytes,
            beside_ms=timed_ms(by_torch),
        )  # fmt: skip

    return run


def _prefill(dtype: KvDtype, past: int, rows: int) -> Item:
    def run(best: Limits) -> Result:
        from pagemesh.kernels.paged_prefill.triton import paged_prefill, row_blocks

        pool, batch = filled(dtype, 1, past, rows)
        own = on_device(batch)
        made = row_blocks(batch.row_indptr.numpy(), HEADS // KV_HEADS)
        blocks = torch.from_numpy(made).cuda()
        q = torch.randn(rows, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        k, v = contiguous(pool, batch, 1, past + rows)
        back = torch.arange(past, past + rows, device="cuda").unsqueeze(1)
        seen = torch.arange(past + rows, device="cuda") <= back

        def by_torch() -> Tensor:
            mixed = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1)[None], k, v, scale=SCALE, enable_gqa=True,
                attn_mask=seen if past else None, is_causal=not past,
            )  # fmt: skip
            return mixed[0].transpose(0, 1)

        got = paged_prefill(q, pool, 0, own, SCALE, blocks=blocks)
        ms = timed_ms(lambda: paged_prefill(q, pool, 0, own, SCALE, blocks=blocks))
        flops = 4 * HEADS * HEAD_DIM * (rows * past + rows * (rows + 1) // 2)
        return Result(
            difference(got, by_torch()), 0.03, ms,
            flops_fraction=flops / ms * 1e3 / best.flops_per_s, beside_ms=timed_ms(by_torch),
        )  # fmt: skip

    return run


def _kv_write(dtype: KvDtype) -> Item:
    def run(best: Limits) -> Result:
        from pagemesh.kernels.kv_write import reference
        from pagemesh.kernels.kv_write.triton import kv_write

        pool, twin = device_pool(dtype, 1024), device_pool(dtype, 1024)
        slots = torch.randperm(1024 * PAGE_SIZE, device="cuda")[:8192]
        k, v = (torch.randn(8192, KV_HEADS, HEAD_DIM, device="cuda") for _ in range(2))
        kv_write(k, v, pool, 0, slots)
        reference.kv_write(k, v, twin, 0, slots)
        wrong = float((pool.memory != twin.memory).float().mean())
        ms = timed_ms(lambda: kv_write(k, v, pool, 0, slots))
        moved_bytes = 8192 * pool.layout.token_bytes + k.nbytes + v.nbytes
        # A code may fall either way where a quotient differs in its last bit.
        return Result(
            wrong, 1e-4, ms, bandwidth_fraction=moved_bytes / ms * 1e3 / best.bandwidth_bytes
        )

    return run


def _page_copy(best: Limits) -> Result:
    from pagemesh.kernels.page_copy.triton import page_copy

    pool = device_pool("bfloat16", 128, layers=32)
    pool.memory.random_()
    copies = [(page, page + 64) for page in range(64)]
    page_copy(pool, copies)
    pages = pool.memory.view(128, -1)
    wrong = float((pages[:64] != pages[64:]).float().mean())
    ms = timed_ms(lambda: page_copy(pool, copies))
    return Result(wrong, 0.0, ms, pool.memory.nbytes / ms * 1e3 / best.bandwidth_bytes)


def moved(_best: Limits, maker: MemoryMaker | None = None) -> Result:
    """64 pages of 1 MiB, every other one of a pool, to the host's memory and from there to others;
    torch's own copy of as many bytes beside it."""
    maker = maker or CudaMaker(torch.device("cuda", 0))
    pages, page_bytes = np.arange(0, 256, 4, dtype=np.uint32), 1 << 20
    size, taken_bytes = 256 * page_bytes, len(pages) * page_bytes
    memory, staging = maker.make(size), os.memfd_create("pagemesh-bench")
    os.ftruncate(staging, taken_bytes)
    mapped, mover = maker.map(memory, size), PageMover(maker)
    pool = mapped.bytes[:size].view(256, page_bytes)
    pool[::4] = torch.randint(0, 256, (64, page_bytes), dtype=torch.uint8, device=pool.device)

    tables: dict[Direction, NDArray[np.uint32]] = {"out": pages, "in": pages + 1}

    def move() -> None:
        for direction, table in tables.items():
            message = MovePages(
                direction=direction, pool_incarnation=1, size_bytes=size, page_bytes=page_bytes,
                extents=pack_extents(table),
            )  # fmt: skip
            mover.move(message, memory, staging)

    time_ms = timed_ms(move)
    error = difference(pool[1::4].float(), pool[::4].float())
    beside_ms = timed_ms(lambda: pool[::4].cpu().to(pool.device))
    mover.close()
    mapped.close()
    for descriptor in (memory, staging):
        os.close(descriptor)
    return Result(error, 0.0, time_ms, beside_ms=beside_ms)


def _rows(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def _rms_norm(best: Limits) -> Result:
    from pagemesh.kernels.rms_norm import reference
    from pagemesh.kernels.rms_norm.triton import rms_norm

    x, weight = _rows(8192, 4096), _rows(4096)
    expected = reference.rms_norm(x.float(), weight.float(), 1e-6)
    ms = timed_ms(lambda: rms_norm(x, weight, 1e-6))
    error = difference(rms_norm(x, weight, 1e-6), expected)
    return Result(error, 0.01, ms, 2 * x.nbytes / ms * 1e3 / best.bandwidth_bytes)


def _add_rms_norm(best: Limits) -> Result:
    from pagemesh.kernels.add_rms_norm import reference
    from pagemesh.kernels.add_rms_norm.triton import add_rms_norm

    x, addend, weight = _rows(8192, 4096), _rows(8192, 4096), _rows(4096)
    expected = reference.add_rms_norm(x.clone(), addend, weight, 1e-6)
    error = difference(add_rms_norm(x.clone(), addend, weight, 1e-6), expected)
    ms = timed_ms(lambda: add_rms_norm(x, addend, weight, 1e-6))
    return Result(error, 0.01, ms, 4 * x.nbytes / ms * 1e3 / best.bandwidth_bytes)


def _silu_mul(best: Limits) -> Result:
    from pagemesh.kernels.silu_mul import reference
    from pagemesh.kernels.silu_mul.triton import silu_mul

    x = _rows(8192, 2 * 11008)
    error = difference(silu_mul(x), reference.silu_mul(x.float()))
    ms = timed_ms(lambda: silu_mul(x))
    return Result(error, 0.01, ms, 1.5 * x.nbytes / ms * 1e3 / best.bandwidth_bytes)


def _step(batch: int) -> Item:
    """A random model of 1.5 billion parameters: a step's time against reading its weights, and
    ``torch_ms`` is the same step without a graph."""

    def run(best: Limits) -> Result:
        config, weights = _random_model()
        pool = device_pool("bfloat16", 64 * batch, config.layer_count)
        tables = [np.arange(64 * i, 64 * i + 64, dtype=np.uint32) for i in range(batch)]
        rows = ragged_batch(tables, [512] * batch, [1] * batch, PAGE_SIZE)
        tokens, wanted = torch.arange(batch), torch.arange(batch)
        with_graphs = CudaDecoder(config, weights, with_graphs=True)
        without = CudaDecoder(config, weights, with_graphs=False)

        def step(decoder: CudaDecoder) -> Tensor:
            logits = decoder.step(tokens, rows, wanted, pool, logits=True)[1]
            assert logits is not None
            return logits

        error = difference(step(with_graphs), step(without))
        ms, plain_ms = timed_ms(lambda: step(with_graphs)), timed_ms(lambda: step(without))
        linear = [(d.qkv, d.output, d.gate_up, d.down) for d in weights.layers]
        read_bytes = sum(one.weight.nbytes for layer in linear for one in layer)
        read_bytes += weights.head.weight.nbytes
        fraction = read_bytes / ms * 1e3 / best.bandwidth_bytes
        return Result(error, 0.02, ms, fraction, beside_ms=plain_ms)

    return run


def _random_model() -> tuple[DecoderConfig, DeviceWeights]:
    hidden, mlp, vocab, layers = 2048, 8192, 32_000, 24
    frequencies = (1.0 / 10_000.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)).tolist()
    config = DecoderConfig(
        architecture="LlamaForCausalLM", layer_count=layers, hidden_size=hidden,
        head_count=16, kv_head_count=KV_HEADS, head_dim=HEAD_DIM, mlp_size=mlp,
        vocab_tokens=vocab, context_tokens_max=8192, norm_epsilon=1e-6,
        rope=Rope(tuple(frequencies), 1.0), tied_embeddings=False, qkv_bias=False,
        output_bias=False, mlp_bias=False, head_norm=False,
    )  # fmt: skip

    def dense(outputs: int, inputs: int) -> Dense:
        return Dense(_rows(outputs, inputs) * inputs**-0.5, None)

    ones = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    width = config.query_size + 2 * config.kv_size
    return config, DeviceWeights(
        embedding=_rows(vocab, hidden),
        layers=tuple(
            DeviceLayer(
                ones, dense(width, hidden), None, dense(hidden, config.query_size), ones,
                dense(2 * mlp, hidden), dense(hidden, mlp),
            )
            for _ in range(layers)
        ),
        norm=ones,
        head=dense(vocab, hidden),
    )  # fmt: skip
