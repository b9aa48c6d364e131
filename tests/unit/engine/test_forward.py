"""The forward pass agrees with ``transformers`` and, row by row, with itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.engine.harness import (
    Pages,
    load_decoder,
    logits_in_chunks,
    logits_of,
    some_tokens,
)
from tests.unit.engine.models import VOCAB, save_twin, twins

from pagemesh.engine.forward import Decoder
from pagemesh.kernels import paged_prefill
from pagemesh.kernels.native.library import CpuLevel
from pagemesh.kernels.ops import KvPool, ragged_batch
from pagemesh.wire.tokens import U32

TOLERANCE = 1e-4
"""Of the widest logit: float32 in another order of summation."""


def expected_logits(twin: Any, tokens: U32) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        logits: torch.Tensor = twin(ids).logits[0]
    return logits


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.fixture(scope="module")
def one_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "model"
    save_twin(folder, twins()["qwen3-head-norm"])
    return folder


@pytest.mark.parametrize("name", twins())
@pytest.mark.parametrize("deterministic", [False, True])
def test_logits_equal_those_of_transformers(name: str, deterministic: bool, tmp_path: Path) -> None:
    twin = save_twin(tmp_path / "model", twins()[name])
    decoder, pool = load_decoder(tmp_path / "model", deterministic=deterministic)
    tokens = some_tokens(230, vocab=VOCAB)
    wanted = expected_logits(twin, tokens)
    pages = Pages(pool)
    for chunks in ([230], [129, 7, 1, 64, 13]):
        got = logits_in_chunks(decoder, pool, pages.table(230), tokens, chunks)
        assert relative_error(got, wanted) < TOLERANCE


def test_a_mixed_batch_of_chunks_and_single_tokens_agrees_with_transformers(
    tmp_path: Path,
) -> None:
    twin = save_twin(tmp_path / "model", twins()["llama-rope3-wide-heads"])
    decoder, pool = load_decoder(tmp_path / "model", deterministic=False)
    pages = Pages(pool)
    lengths, done = [90, 33, 200, 17, 64], [89, 0, 71, 16, 63]
    sequences = [
        (pages.table(length), some_tokens(length, vocab=VOCAB, seed=length), start)
        for length, start in zip(lengths, done, strict=True)
    ]
    for table, tokens, start in sequences:
        if start:
            logits_of(decoder, pool, [(table, tokens[:start], 0)])
    rows = [(table, tokens[start:], start) for table, tokens, start in sequences]
    for got, (_, tokens, start) in zip(logits_of(decoder, pool, rows), sequences, strict=True):
        assert relative_error(got, expected_logits(twin, tokens)[start:]) < TOLERANCE


@pytest.mark.parametrize("level", [CpuLevel.PORTABLE], indirect=True, ids=["portable"])
@pytest.mark.parametrize("name", twins())
def test_long_prompts_without_vectors_go_by_torch_and_agree_with_transformers(
    name: str, level: CpuLevel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ``step``, as workers compute them: a whole prompt, and the rest of one whose past is in
    its pages beside a short one, which stays with our own kernel."""
    starts: list[int] = []
    by_torch = paged_prefill.by_torch

    def noted(*arguments: Any) -> torch.Tensor:
        starts.append(arguments[4])
        return by_torch(*arguments)

    monkeypatch.setattr(paged_prefill, "by_torch", noted)
    twin = save_twin(tmp_path / "model", twins()[name])
    decoder, pool = load_decoder(tmp_path / "model", deterministic=False)
    pages = Pages(pool)
    long, short = (some_tokens(count, vocab=VOCAB, seed=count) for count in (420, 70))
    tables = [pages.table(420), pages.table(70)]
    for parts in ([(0, 150)], [(150, 420), (0, 70)]):
        tokens = [whole[slice(*part)] for whole, part in zip((long, short), parts, strict=False)]
        got = _last_logits_of_step(decoder, pool, tables, tokens, [start for start, _ in parts])
        for logits, whole, (_, end) in zip(got, (long, short), parts, strict=False):
            assert relative_error(logits, expected_logits(twin, whole[:end])[-1]) < TOLERANCE
    # The last layer attends with the wanted rows alone, which are few.
    layers = decoder.config.layer_count - 1
    assert starts == [0] * layers + [150] * layers


def _last_logits_of_step(
    decoder: Decoder, pool: KvPool, tables: list[U32], tokens: list[U32], starts: list[int]
) -> torch.Tensor:
    """Logits [sequences, vocab] of the last token of each."""
    counts = [len(some) for some in tokens]
    batch = ragged_batch(tables[: len(counts)], starts, counts, pool.layout.page_size)
    ids = torch.from_numpy(np.concatenate(tokens).astype(np.int64))
    _, logits = decoder.step(ids, batch, batch.row_indptr[1:].long() - 1, pool, logits=True)
    assert logits is not None
    return logits


@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
def test_page_sizes_do_not_matter(one_model: Path, page_size: int) -> None:
    tokens = some_tokens(60, vocab=VOCAB)
    wide, wide_pool = load_decoder(one_model)
    decoder, pool = load_decoder(one_model, page_size=page_size)
    wanted = logits_in_chunks(wide, wide_pool, Pages(wide_pool).table(60), tokens, [60])
    got = logits_in_chunks(decoder, pool, Pages(pool).table(60), tokens, [37])
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["llama-tied-biased", "qwen2-bias", "qwen3-head-norm"])
def test_a_row_has_the_same_bits_however_it_is_chunked_and_batched(
    name: str, tmp_path: Path
) -> None:
    save_twin(tmp_path / "model", twins()[name])
    decoder, pool = load_decoder(tmp_path / "model")
    pages = Pages(pool)
    tokens = some_tokens(150, vocab=VOCAB)
    alone = logits_in_chunks(decoder, pool, pages.table(150), tokens, [150])
    for chunks in ([], [1, 2, 3, 70], [149], [16, 16, 100]):
        got = logits_in_chunks(decoder, pool, pages.table(150), tokens, chunks)
        assert torch.equal(got, alone), chunks
    assert torch.equal(_logits_among_others(decoder, pool, pages, tokens), alone)


def _logits_among_others(decoder: Decoder, pool: KvPool, pages: Pages, tokens: U32) -> torch.Tensor:
    """The logits of ``tokens`` computed in steps of 1 to 20, between other sequences' rows."""
    random = np.random.default_rng(3)
    table, parts, start = pages.table(len(tokens)), [], 0
    others = [(pages.table(40), some_tokens(40, vocab=VOCAB, seed=seed)) for seed in range(4)]
    while start < len(tokens):
        size = int(random.integers(1, 21))
        own = (table, tokens[start : start + size], start)
        rows = [(other, some[: int(random.integers(1, 40))], 0) for other, some in others]
        place = int(random.integers(0, 5))
        rows.insert(place, own)
        parts.append(logits_of(decoder, pool, rows)[place])
        start += size
    return torch.cat(parts)


def test_a_shared_prefix_gives_the_bits_that_computing_it_gives(one_model: Path) -> None:
    decoder, pool = load_decoder(one_model)
    pages = Pages(pool)
    tokens = some_tokens(100, vocab=VOCAB)
    writer = pages.table(64)
    logits_of(decoder, pool, [(writer, tokens[:64], 0)])
    reader = np.concatenate([writer, pages.table(36)])
    (shared,) = logits_of(decoder, pool, [(reader, tokens[64:], 64)])
    alone = logits_in_chunks(decoder, pool, pages.table(100), tokens, [100])
    assert torch.equal(shared, alone[64:])


def test_only_wanted_rows_are_carried_through_the_last_layer(one_model: Path) -> None:
    decoder, pool = load_decoder(one_model)
    pages = Pages(pool)
    tokens = some_tokens(50, vocab=VOCAB)
    table = pages.table(50)
    (every,) = logits_of(decoder, pool, [(table, tokens, 0)])
    batch = ragged_batch([table], [0], [50], pool.layout.page_size)
    ids = torch.from_numpy(tokens.astype(np.int64))
    for wanted in ([49], [0, 7, 48], []):
        rows = torch.tensor(wanted, dtype=torch.int64)
        some = decoder.logits(decoder.hidden(ids, batch, rows, pool))
        assert torch.equal(some, every[rows])


def test_a_token_outside_the_vocabulary_raises(one_model: Path) -> None:
    decoder, pool = load_decoder(one_model)
    with pytest.raises(IndexError):
        logits_of(decoder, pool, [(Pages(pool).table(1), np.array([VOCAB], np.uint32), 0)])
