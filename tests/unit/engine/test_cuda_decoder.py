"""The device's forward pass agrees with the CPU's: run here through Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.engine.harness import Pages, load_decoder, some_tokens
from tests.unit.engine.models import VOCAB, save_twin, twins

from pagemesh.engine.checkpoint import Checkpoint
from pagemesh.engine.cuda.decoder import CudaDecoder
from pagemesh.engine.cuda.forward import DeviceForward
from pagemesh.engine.cuda.graphs import ROWS_MAX, Bucket, bucket_of
from pagemesh.engine.cuda.rows import RowsShape, exact_shape, pack, unpack
from pagemesh.engine.cuda.weights import DeviceWeights, load_device_weights
from pagemesh.engine.forward import Decoder
from pagemesh.kernels.ops import KvPool, RaggedBatch, ragged_batch
from pagemesh.wire.tokens import U32

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
CPU = torch.device("cpu")
TOLERANCE = 1e-4
"""Of the widest logit: float32 in another order of summation."""
NO_BLOCKS = np.empty((0, 2), np.int32)


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
    bucket = bucket_of(3, 1, batch.tables.shape[0])
    assert bucket is not None
    assert bucket.rows == 4
    results = []
    for shape, own_pool in ((exact_shape(batch, 3, 0), pool), (bucket.shape, twin)):
        words = torch.from_numpy(pack(shape, tokens, batch, wanted, NO_BLOCKS))
        results.append(forward.hidden(unpack(shape, words), own_pool, bucket.spans))
    torch.testing.assert_close(results[1][:3], results[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pool.memory.view(torch.float32), twin.memory.view(torch.float32))


def test_a_step_comes_out_of_one_array_as_it_went_in() -> None:
    tables = [np.array([7, 3, 9], np.uint32), np.array([2], np.uint32)]
    batch = ragged_batch(tables, [33, 0], [2, 4], 16)
    tokens, wanted = torch.arange(10, 16), torch.tensor([1, 5])
    blocks = np.array([[0, 2], [2, 6]], np.int32)
    shape = exact_shape(batch, 2, 2)
    got = unpack(shape, torch.from_numpy(pack(shape, tokens, batch, wanted, blocks)))
    assert got.tokens.tolist() == tokens.tolist()
    assert got.batch.slots.tolist() == batch.slots.tolist()
    assert got.batch.row_position.tolist() == [33, 34, 0, 1, 2, 3]
    assert got.batch.row_sequence.tolist() == [0, 0, 1, 1, 1, 1]
    assert got.batch.table_indptr.tolist() == [0, 3, 4]
    assert got.batch.tables.tolist() == [7, 3, 9, 2]
    assert got.blocks.tolist() == blocks.tolist()
    assert got.wanted.tolist() == [1, 5]


def test_a_step_larger_than_its_bucket_is_refused() -> None:
    batch = ragged_batch([np.array([1], np.uint32)] * 3, [0] * 3, [1] * 3, 16)
    three = torch.arange(3)
    with pytest.raises(ValueError, match="3 rows in a step with room for 2"):
        pack(RowsShape(2, 3, 0, 3, 3), three, batch, three, NO_BLOCKS)
    with pytest.raises(ValueError, match="3 pages in a step with room for 2"):
        pack(RowsShape(3, 3, 0, 3, 2), three, batch, three, NO_BLOCKS)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 17, 63, 64, ROWS_MAX])
@pytest.mark.parametrize("pages", [1, 100, 4097])
def test_a_bucket_holds_its_step_and_not_much_more(rows: int, pages: int) -> None:
    bucket = bucket_of(rows, 3, pages)
    assert bucket is not None
    assert rows <= bucket.rows < max(2 * rows, rows + 8)
    assert bucket.spans == 4
    assert pages <= bucket.pages
    assert bucket.shape.rows == bucket.shape.wanted == bucket.rows


def test_steps_of_many_lengths_share_few_buckets() -> None:
    assert bucket_of(ROWS_MAX + 1, 1, 1) is None
    assert bucket_of(0, 1, 0) is None
    buckets = {bucket_of(rows, spans, 8 * rows) for rows in range(1, 65) for spans in (1, 2)}
    assert len(buckets) == 22
    assert Bucket(64, 2, 512) in buckets
