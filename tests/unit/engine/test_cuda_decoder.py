"""The device's forward pass agrees with the CPU's: run here through Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.engine.harness import Pages, load_decoder, some_tokens
from tests.unit.engine.models import VOCAB, save_twin, twins

from pagemesh.engine.checkpoint import Checkpoint
from pagemesh.engine.cuda.decoder import CudaDecoder
from pagemesh.engine.cuda.forward import DeviceForward
from pagemesh.engine.cuda.graphs import Bucket, bucket_of
from pagemesh.engine.cuda.launches import NO_BLOCKS, Launch, StepRows
from pagemesh.engine.cuda.rows import DeviceRows, RowsShape, exact_shape, pack, unpack
from pagemesh.engine.cuda.weights import DeviceWeights, load_device_weights
from pagemesh.engine.forward import Decoder
from pagemesh.kernels.linear.packed import unpack_linear
from pagemesh.kernels.ops import KvPool, RaggedBatch, ragged_batch
from pagemesh.wire.tokens import U32

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
CPU = torch.device("cpu")
TOLERANCE = 1e-4
"""Of the widest logit: float32 in another order of summation."""


def save_small(folder: Path, name: str) -> None:
    """The interpreter takes milliseconds a program."""
    config = twins()[name]
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    save_twin(folder, config)


def device_weights(folder: Path, decoder: Decoder) -> DeviceWeights:
    with Checkpoint(folder) as checkpoint:
        return load_device_weights(checkpoint, decoder.config, CPU, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_are_multiplied_in_the_type_that_is_computed_with(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """Whatever is stored: pages of the CPU and of a GPU are of one root in float32."""
    save_twin(tmp_path / "model", twins()["granite-factors-tied-biased"], dtype=dtype)
    decoder, _ = load_decoder(tmp_path / "model", deterministic=False)
    own, cpu = device_weights(tmp_path / "model", decoder), decoder.weights
    assert own.embedding.dtype == own.head.weight.dtype == torch.float32
    assert torch.equal(own.embedding, cpu.embedding)
    assert torch.equal(own.head.weight, unpack_linear(cpu.head))
    for mine, other in zip(own.layers, cpu.layers, strict=True):
        assert torch.equal(mine.output.weight, unpack_linear(other.output))
        assert torch.equal(mine.down.weight, unpack_linear(other.down))


def rows_of(
    pool: KvPool, parts: list[tuple[U32, U32, int]]
) -> tuple[torch.Tensor, RaggedBatch, torch.Tensor]:
    """Tokens, batch and every row wanted, of (page table, tokens, start)."""
    tables, tokens, starts = zip(*parts, strict=True)
    batch = ragged_batch(tables, starts, [len(own) for own in tokens], pool.layout.page_size)
    joined = torch.from_numpy(np.concatenate(tokens).astype(np.int64))
    return joined, batch, torch.arange(batch.rows)


@pytest.mark.parametrize(
    "name", ["llama-tied-biased", "qwen2-bias", "qwen3-head-norm", "llama-linear-rope-one-kv-head"]
)
def test_chunks_decode_steps_and_both_together_agree_with_the_cpu(
    name: str, tmp_path: Path
) -> None:
    save_small(tmp_path / "model", name)
    decoder, pool = load_decoder(tmp_path / "model", deterministic=False)
    other_pool = KvPool(pool.layout, pool.memory.numpy().copy())
    device = CudaDecoder(
        decoder.config, device_weights(tmp_path / "model", decoder), with_graphs=False
    )
    pages = Pages(pool)
    long, other = (pages.table(30), some_tokens(30, vocab=VOCAB)), pages.table(20)
    short = (other, some_tokens(20, vocab=VOCAB, seed=1))
    steps = [
        [(long[0], long[1][:17], 0)],
        [(short[0], short[1][:5], 0), (long[0], long[1][17:20], 17)],
        [(long[0], long[1][20:21], 20), (short[0], short[1][5:6], 5)],
        [(long[0], long[1][21:22], 21), (short[0], short[1][6:13], 6)],
    ]
    for parts in steps:
        tokens, batch, wanted = rows_of(pool, parts)
        expected = decoder.logits(decoder.hidden(tokens, batch, wanted, pool))
        _, got = device.step(tokens, batch, wanted, other_pool, logits=True)
        assert got is not None
        assert float((got - expected).abs().max() / expected.abs().max()) < TOLERANCE


def test_only_the_wanted_rows_come_back_and_their_logits_can_be_asked_for_later(
    tmp_path: Path,
) -> None:
    save_small(tmp_path / "model", "llama")
    decoder, pool = load_decoder(tmp_path / "model")
    weights = device_weights(tmp_path / "model", decoder)
    device = CudaDecoder(decoder.config, weights, with_graphs=False)
    table = Pages(pool).table(6)
    tokens, batch, every = rows_of(pool, [(table, some_tokens(6, vocab=VOCAB), 0)])
    whole, none = device.step(tokens, batch, every, pool, logits=False)
    some, logits = device.step(tokens, batch, torch.tensor([3, 5]), pool, logits=True)
    assert none is None
    torch.testing.assert_close(some, whole[[3, 5]])
    torch.testing.assert_close(logits, device.logits(whole[[3, 5]]))


def test_padding_to_a_bucket_changes_no_row_and_writes_no_page(tmp_path: Path) -> None:
    save_small(tmp_path / "model", "qwen3-head-norm")
    decoder, pool = load_decoder(tmp_path / "model")
    forward = DeviceForward(decoder.config, device_weights(tmp_path / "model", decoder))
    pages = Pages(pool)
    pool.memory.view(torch.float32).normal_()
    twin = KvPool(pool.layout, pool.memory.numpy().copy())
    parts = [(pages.table(30), some_tokens(1, vocab=VOCAB, seed=row), 20 + row) for row in range(3)]
    tokens, batch, wanted = rows_of(pool, parts)
    bucket = bucket_of(3, 1)
    assert bucket is not None
    assert bucket.rows == 4
    results = []
    exact, padded = exact_shape(batch, 3, 0), bucket.shape(batch.tables.shape[0], 64)
    for shape, own_pool in ((exact, pool), (padded, twin)):
        split = StepRows(None, (Launch(0, 3, bucket.spans),), NO_BLOCKS)
        words = torch.from_numpy(pack(shape, tokens, batch, wanted, split))
        rows = unpack(shape, words, (Launch(0, shape.rows, bucket.spans),))
        results.append(forward.hidden(rows, own_pool))
    torch.testing.assert_close(results[1][:3], results[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pool.memory.view(torch.float32), twin.memory.view(torch.float32))


def test_a_step_comes_out_of_one_array_as_it_went_in() -> None:
    tables = [np.array([7, 3, 9], np.uint32), np.array([2], np.uint32)]
    batch = ragged_batch(tables, [33, 0], [2, 4], 16)
    tokens, wanted = torch.arange(10, 16), torch.tensor([1, 5])
    blocks = np.array([[0, 2], [2, 6]], np.int32)
    shape = exact_shape(batch, 2, 2)
    words = torch.from_numpy(pack(shape, tokens, batch, wanted, StepRows(None, (), blocks)))
    got = unpack(shape, words, ())
    assert got.tokens.tolist() == tokens.tolist()
    assert got.batch.slots.tolist() == batch.slots.tolist()
    assert got.batch.row_position.tolist() == [33, 34, 0, 1, 2, 3]
    assert got.batch.row_sequence.tolist() == [0, 0, 1, 1, 1, 1]
    assert got.batch.table_indptr.tolist() == [0, 3, 4]
    assert got.batch.tables.tolist() == [7, 3, 9, 2]
    assert got.blocks.tolist() == [[0, 2, 33, 0], [2, 6, 0, 3]]
    assert got.wanted.tolist() == [1, 5]


def test_rows_of_prompts_begin_where_a_graph_has_room_for_them() -> None:
    tables = [np.array([7, 3], np.uint32), np.array([2], np.uint32), np.array([5], np.uint32)]
    batch = ragged_batch(tables, [0, 9, 4], [5, 1, 1], 16)
    tokens, wanted = torch.arange(10, 17), torch.tensor([4, 5, 6])
    order = np.array([5, 6, 0, 1, 2, 3, 4])
    split = StepRows(order, (Launch(0, 2, 1),), np.array([[2, 7]], np.int32))
    bucket = bucket_of(2, 1, 5)
    assert bucket == Bucket(8, 4, 16)
    shape = bucket.shape(4, 64)
    words = torch.from_numpy(pack(shape, tokens, batch, wanted, split, prompts_from=bucket.rows))
    got = unpack(shape, words, bucket.launches)
    assert got.tokens.tolist() == [15, 16, *[0] * 6, *range(10, 15), *[0] * 11]
    assert got.batch.row_position.tolist() == [9, 4, *[-1] * 6, *range(5), *[-1] * 11]
    assert got.batch.slots.tolist()[:2] == [2 * 16 + 9, 5 * 16 + 4]
    assert got.batch.slots.tolist()[8:13] == [7 * 16 + slot for slot in range(5)]
    assert set(got.batch.slots.tolist()[2:8] + got.batch.slots.tolist()[13:]) == {-1}
    assert got.blocks.tolist() == [[8, 13, 0, 0], *[[0] * 4] * (shape.blocks - 1)]
    assert got.wanted.tolist()[:3] == [12, 0, 1]
    assert [(one.part, one.spans) for one in got.alone] == [(slice(0, 8), 4)]


@pytest.mark.parametrize("blocks", [0, 1, 3])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 64])
def test_every_section_and_every_launch_begins_where_kernels_are_compiled_for(
    rows: int, blocks: int
) -> None:
    shape = RowsShape(rows, max(rows - 1, 1), blocks, max(rows - 2, 0), 7)
    launches = tuple(Launch(first, min(first + 4, rows), 1) for first in range(0, rows, 4))
    got = unpack(shape, torch.zeros(shape.words, dtype=torch.int32), launches)
    whole = got.batch
    tensors = [
        got.tokens, got.blocks, got.wanted, whole.tables, whole.table_indptr, whole.row_sequence,
        whole.row_position, whole.slots,
    ]  # fmt: skip
    tensors += [own.batch.row_position for own in got.alone]
    tensors += [own.batch.row_sequence for own in got.alone]
    assert [one.data_ptr() % 16 for one in tensors if one.numel()] == [0] * sum(
        one.numel() > 0 for one in tensors
    )


def test_single_tokens_beside_a_chunk_are_those_of_the_cpu_and_take_kernels_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_small(tmp_path / "model", "qwen2-bias")
    decoder, pool = load_decoder(tmp_path / "model", deterministic=False)
    pool.memory.view(torch.float32).normal_()
    other_pool = KvPool(pool.layout, pool.memory.numpy().copy())
    weights = device_weights(tmp_path / "model", decoder)
    device = CudaDecoder(decoder.config, weights, with_graphs=False)
    launched: list[tuple[str, int]] = []
    forward = device._forward
    attend, prefill = forward._paged_attention, forward._paged_prefill

    def one_by_one(q: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        launched.append(("rows", len(q)))
        return attend(q, *given, **named)

    def by_blocks(*given: Any, blocks: torch.Tensor, first_row: int) -> torch.Tensor:
        launched.append(("blocks", len(blocks)))
        return prefill(*given, blocks=blocks, first_row=first_row)

    monkeypatch.setattr(forward, "_paged_attention", one_by_one)
    monkeypatch.setattr(forward, "_paged_prefill", by_blocks)
    pages = Pages(pool)
    starts = [3, 40, 17, 0, 63, 9]
    parts = [(pages.table(64), some_tokens(1, vocab=VOCAB, seed=start), start) for start in starts]
    parts.insert(2, (pages.table(64), some_tokens(21, vocab=VOCAB, seed=7), 11))
    parts.append((pages.table(64), some_tokens(3, vocab=VOCAB, seed=8), 30))
    tokens, batch, every = rows_of(pool, parts)
    wanted = every[[0, 5, 22, 24, 29]]
    expected = decoder.logits(decoder.hidden(tokens, batch, wanted, pool))
    _, got = device.step(tokens, batch, wanted, other_pool, logits=True)
    assert got is not None
    assert float((got - expected).abs().max() / expected.abs().max()) < TOLERANCE
    layers = decoder.config.layer_count
    assert launched == [("rows", 9), ("blocks", 1)] * layers


def test_every_kernel_of_a_step_is_tried_in_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_small(tmp_path / "model", "llama")
    decoder, pool = load_decoder(tmp_path / "model")
    weights = device_weights(tmp_path / "model", decoder)
    device = CudaDecoder(decoder.config, weights, with_graphs=False)
    seen: list[tuple[int, int]] = []
    hidden = device._forward.hidden

    def noted(rows: DeviceRows, own: KvPool) -> torch.Tensor:
        seen.append((sum(part.spans for part in rows.alone), len(rows.blocks)))
        assert own.address == pool.address
        return hidden(rows, own)

    monkeypatch.setattr(device._forward, "hidden", noted)
    before = pool.memory.view(pool.page_count, -1).clone()
    device.warm_up(pool)
    assert seen == [(1, 0), (4, 0), (16, 0), (0, 1)]
    after = pool.memory.view(pool.page_count, -1)
    assert after[0].any() and torch.equal(after[1:], before[1:])


def test_a_step_larger_than_its_bucket_is_refused() -> None:
    batch = ragged_batch([np.array([1], np.uint32)] * 3, [0] * 3, [1] * 3, 16)
    three, split = torch.arange(3), StepRows(None, (Launch(0, 3, 1),), NO_BLOCKS)
    with pytest.raises(ValueError, match="3 rows in a step with room for 2"):
        pack(RowsShape(2, 3, 0, 3, 3), three, batch, three, split)
    with pytest.raises(ValueError, match="3 pages in a step with room for 2"):
        pack(RowsShape(3, 3, 0, 3, 2), three, batch, three, split)
