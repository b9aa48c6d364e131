"""A whole step in one native call computes the very bits of the operations it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.engine.harness import Pages, load_decoder, some_tokens
from tests.unit.engine.models import VOCAB, save_twin, twins

from pagemesh.engine.forward import Decoder
from pagemesh.kernels.decoder_step import phases
from pagemesh.kernels.native.library import CpuLevel
from pagemesh.kernels.ops import KvPool, RaggedBatch, ragged_batch

LENGTHS = [(0, 70), (69, 1), (33, 5), (0, 1), (600, 1), (199, 1), (17, 300)]
"""Start and row count of each sequence of a mixed batch."""


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Case:
    """Sequences of ``spans`` (start, count) over a pool whose past is random."""

    def __init__(self, decoder: Decoder, layout_of: KvPool, spans: list[tuple[int, int]]) -> None:
        self.decoder = decoder
        self.before = layout_of
        self.before.memory.view(torch.float32).normal_()
        pages = Pages(self.before)
        tables = [pages.table(start + count) for start, count in spans]
        counts = [count for _, count in spans]
        size = self.before.layout.page_size
        self.batch = ragged_batch(tables, [start for start, _ in spans], counts, size)
        self.tokens = torch.from_numpy(some_tokens(sum(counts), vocab=VOCAB).astype(np.int64))

    def pool(self) -> KvPool:
        return KvPool(self.before.layout, self.before.memory.numpy().copy())

    def check(self, wanted: torch.Tensor) -> None:
        """Hidden states, logits and every byte of the pool are those of single operations."""
        whole, single = self.pool(), self.pool()
        hidden = self.decoder.hidden(self.tokens, self.batch, wanted, single)
        logits = self.decoder.logits(hidden)
        got = self.decoder.step(self.tokens, self.batch, wanted, whole, logits=True)
        assert torch.equal(got[0], hidden)
        assert got[1] is not None
        assert torch.equal(got[1], logits)
        assert torch.equal(whole.memory, single.memory)


def ends(batch: RaggedBatch) -> torch.Tensor:
    return batch.row_indptr[1:].long() - 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all models, so that each is made once."""
    return tmp_path_factory.mktemp("step")


@pytest.mark.parametrize("name", twins())
def test_every_architecture_has_the_bits_of_its_operations(
    name: str, level: CpuLevel, folders: Path
) -> None:
    if not (folders / name).exists():
        save_twin(folders / name, twins()[name])
    decoder, pool = load_decoder(folders / name, page_size=20)
    for spans in ([(0, 70), (33, 5), (199, 1)], [(12, 1)], [(5, 1)] * 9):
        case = Case(decoder, pool, spans)
        case.check(ends(case.batch))
        case.check(torch.arange(case.batch.rows))


@pytest.fixture(scope="module")
def model_folder(folders: Path) -> Path:
    folder = folders / "wide"
    shape = twins()["qwen3-head-norm"]
    # Wide enough for several threads to have work in every product.
    shape.hidden_size, shape.intermediate_size, shape.max_position_embeddings = 320, 700, 1024
    save_twin(folder, shape)
    return folder


def test_a_mixed_batch_has_the_same_bits_on_any_number_of_threads(
    model_folder: Path, level: CpuLevel, threads: int
) -> None:
    decoder, pool = load_decoder(model_folder)
    for spans in (LENGTHS, [(100, 512)]):  # and whole units of work, which are no whole tiles
        case = Case(decoder, pool, spans)
        case.check(ends(case.batch))


@pytest.mark.parametrize("width", [96, 544])
def test_gates_are_applied_to_sums_that_were_read_once_or_carried_over_several_blocks(
    folders: Path, level: CpuLevel, width: int
) -> None:
    # Of the narrower one threads have too few panels to read them in pairs.
    folder = folders / f"deep-{width}"
    if not folder.exists():
        shape = twins()["qwen3-head-norm"]
        shape.hidden_size, shape.intermediate_size = 704, width
        save_twin(folder, shape)
    decoder, pool = load_decoder(folder)
    for rows in (*range(1, 17), 40, 270):
        case = Case(decoder, pool, [(0, rows)])
        case.check(torch.arange(rows))


def test_on_vectors_the_default_has_the_bits_of_deterministic_steps(
    model_folder: Path, level: CpuLevel
) -> None:
    if level in (CpuLevel.PORTABLE, CpuLevel.AMX):
        pytest.skip("here the default has quicker ways that round otherwise")
    default, pool = load_decoder(model_folder, deterministic=False)
    exact, _ = load_decoder(model_folder, deterministic=True)
    case = Case(default, pool, LENGTHS)
    step = (case.tokens, case.batch, ends(case.batch))
    got, wanted = case.pool(), case.pool()
    logits = default.step(*step, got, logits=True)[1]
    exact_logits = exact.step(*step, wanted, logits=True)[1]
    assert logits is not None and exact_logits is not None
    assert torch.equal(logits, exact_logits)
    assert torch.equal(got.memory, wanted.memory)


def test_a_row_has_the_same_bits_in_any_company(model_folder: Path, level: CpuLevel) -> None:
    decoder, pool = load_decoder(model_folder)
    case = Case(decoder, pool, [(30 + i, 1) for i in range(40)])
    together, _ = decoder.step(case.tokens, case.batch, torch.arange(40), case.pool(), logits=False)
    together = together.clone()
    for count in (1, 5, 9, 17, 33):
        some = case.decoder.step(
            case.tokens[:count], first_sequences(case.batch, count), torch.arange(count),
            case.pool(), logits=False,
        )  # fmt: skip
        assert torch.equal(some[0], together[:count]), count


def first_sequences(batch: RaggedBatch, count: int) -> RaggedBatch:
    """The first ``count`` of a batch of single rows."""
    return RaggedBatch(
        tables=batch.tables, table_indptr=batch.table_indptr[: count + 1],
        row_indptr=batch.row_indptr[: count + 1], row_sequence=batch.row_sequence[:count],
        row_position=batch.row_position[:count], slots=batch.slots[:count],
    )  # fmt: skip


def test_nothing_wanted_still_writes_k_and_v(model_folder: Path) -> None:
    decoder, pool = load_decoder(model_folder)
    case = Case(decoder, pool, [(3, 40)])
    case.check(torch.empty(0, dtype=torch.int64))
    case.check(torch.tensor([0, 7, 39]))


def test_an_empty_batch_gives_nothing(model_folder: Path) -> None:
    decoder, pool = load_decoder(model_folder)
    none = torch.empty(0, dtype=torch.int64)
    hidden, logits = decoder.step(none, ragged_batch([], [], [], 16), none, pool, logits=True)
    assert hidden.shape == (0, 320)
    assert logits is not None and logits.shape == (0, VOCAB)


@pytest.mark.parametrize(
    ("refused", "after"),
    [
        pytest.param(3, "many", id="its workspace"),
        pytest.param(4, "one", id="its results"),
    ],
)
def test_after_a_step_that_found_no_memory_no_other_takes_what_is_gone_or_too_small(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, refused: int, after: str
) -> None:
    decoder, pool = load_decoder(model_folder)
    cases = {"one": Case(decoder, pool, [(5, 1)]), "many": Case(decoder, pool, LENGTHS)}
    pools = {name: case.pool() for name, case in cases.items()}
    wanted = {name: ends(case.batch) for name, case in cases.items()}

    def step(name: str) -> torch.Tensor:
        case = cases[name]
        return decoder.step(case.tokens, case.batch, wanted[name], pools[name], logits=True)[0]

    expected = step(after).clone()
    decoder, _ = load_decoder(model_folder)
    asked: list[int] = []
    kept: list[torch.Tensor] = []
    empty = torch.empty

    def scarce(floats: int) -> torch.Tensor:
        asked.append(floats)
        if len(asked) == refused:
            raise MemoryError
        kept.append(empty(100 * floats))  # whoever writes beyond what it asked for breaks nothing
        return kept[-1][:floats]

    monkeypatch.setattr(torch, "empty", scarce)
    step("one")
    with pytest.raises(MemoryError):
        step("many")
    first_workspace = kept[0].fill_(float("nan"))
    assert torch.equal(step(after), expected)
    assert first_workspace.isnan().all()


def test_a_step_says_where_its_time_went(model_folder: Path) -> None:
    decoder, pool = load_decoder(model_folder)
    case, spent = Case(decoder, pool, LENGTHS), phases()
    decoder.step(case.tokens, case.batch, ends(case.batch), pool, logits=True, phase_us=spent)
    assert (spent > 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("token", f"token {VOCAB} of row 2"),
        ("negative", "token -1 of row 2"),
        ("slot", "slot of row 2"),
        ("position", "row 2 is beyond the last position"),
        ("page", "row 2 has no page"),
        ("wanted", "wanted row 1 is not"),
        ("far", "wanted row 1 is not"),
        ("twice", "wanted row 2 is not .* after the one before it"),
    ],
)
def test_what_is_out_of_range_is_named_and_nothing_is_written(
    model_folder: Path, change: str, message: str
) -> None:
    decoder, pool = load_decoder(model_folder)
    case = Case(decoder, pool, [(20, 1)] * 4)
    wanted = torch.arange(4)
    match change:
        case "token":
            case.tokens[2] = VOCAB
        case "negative":
            case.tokens[2] = -1
        case "slot":
            case.batch.slots[2] = pool.page_count * 16
        case "position":
            case.batch.row_position[2] = 1024
        case "page":
            case.batch.tables[case.batch.table_indptr[2]] = pool.page_count
        case "wanted":
            wanted[1] = 4
        case "far":
            wanted[1] = 1 << 40  # not even looked at
        case "twice":
            wanted[2] = 1
    before = pool.memory.clone()
    with pytest.raises(IndexError, match=message):
        decoder.step(case.tokens, case.batch, wanted, pool, logits=True)
    assert torch.equal(pool.memory, before)


def test_matrices_of_which_some_round_their_rows_are_refused(model_folder: Path) -> None:
    decoder, _ = load_decoder(model_folder, weight_type="bfloat16")
    exact = replace(decoder.weights.head, rounds_rows=False)
    mixed = replace(decoder.weights, head=exact)
    with pytest.raises(ValueError, match="the same of all matrices"):
        Decoder(decoder.config, mixed, deterministic=True)


def test_a_pool_of_another_shape_is_refused_with_what_was_expected_and_got(
    model_folder: Path,
) -> None:
    decoder, pool = load_decoder(model_folder)
    case = Case(decoder, pool, [(20, 1)])
    other = KvPool.allocate(type(pool.layout)(layers=2, kv_heads=2, head_dim=24, page_size=16), 4)
    with pytest.raises(ValueError, match=r"expected .*\(3, 2, 24\), got \(2, 2, 24\)"):
        decoder.step(case.tokens, case.batch, torch.arange(1), other, logits=True)
    with pytest.raises(ValueError, match="int64"):
        decoder.step(case.tokens.int(), case.batch, torch.arange(1), pool, logits=True)
