"""The executor runs plans over a real pool file and believes no page that was taken away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.engine.harness import Pages, some_tokens
from tests.unit.engine.models import VOCAB, save_twin, twins

from pagemesh.engine.executor import ModelExecutor
from pagemesh.engine.forward import Decoder
from pagemesh.engine.loading import LoadedModel, load_model
from pagemesh.engine.pool import WorkerPool
from pagemesh.engine.worker.plan import RowResult, Sample, StepPlan, StepResult, StepRow
from pagemesh.kernels.native.header_writer import HeaderWriter
from pagemesh.kernels.native.pool_file import PoolFile
from pagemesh.kernels.native.superblock import Superblock
from pagemesh.wire.errors import Stale
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.pager_messages import SessionOpened
from pagemesh.wire.pool_format import HeaderState, PoolFormat
from pagemesh.wire.tokens import U32, pack_extents
from pagemesh.wire.work_messages import Sampling

PAGE_COUNT = 256
GREEDY = Sampling(temperature=0.0, max_tokens=64, logprobs=2)


class Host:
    """A pool file with a pager's part played by hand, and an executor over it."""

    def __init__(self, model: LoadedModel, twin: Any, folder: Path) -> None:
        layout = model.layout
        form = PoolFormat(PAGE_COUNT, layout.page_size, layout.page_bytes)
        superblock = Superblock(form, incarnation=77, layout_digest=layout.digest)
        self.twin, self.model = twin, model
        self.file = PoolFile.create(folder / "test.pool", superblock)
        self.opened = SessionOpened(
            host="here", epoch=1, pool_incarnation=77, pool=0, pool_path=str(self.file.path),
            page_count=PAGE_COUNT, session_ttl_ms=1000, heartbeat_ms=100,
        )  # fmt: skip
        self.pool = WorkerPool.attach(self.opened, layout)
        self.decoder = Decoder(model.config, model.weights, deterministic=True)
        self.executor = ModelExecutor(self.decoder, layout)
        self.executor.use(self.pool)
        self.pages = Pages(self.pool.pages)
        self.steps = 0

    def grant(self, lease: int, token_count: int, *, granted_at: int = 5) -> U32:
        """Pages and a standing lease in slot ``lease``, as the pager would write them."""
        table = self.pages.table(token_count)
        self.publish(table, granted_at)
        self.file.headers.set_lease_word(lease, lease)
        return table

    def publish(self, table: U32, sequence: int) -> None:
        HeaderWriter(self.file.headers).write(
            pack_extents(table), HeaderState.HELD,
            np.full(len(table), sequence, np.uint64).tobytes(), writer=0, root=0,
        )  # fmt: skip

    def run(self, *rows: StepRow, copies: tuple[tuple[int, int], ...] = ()) -> StepResult:
        self.steps += 1
        result = self.executor.run(StepPlan(self.steps, rows, copies))
        assert result.step == self.steps
        return result


@pytest.fixture(scope="module")
def twin_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("executor") / "model"
    return folder, save_twin(folder, twins()["qwen2-bias"])


@pytest.fixture
def host(twin_folder: tuple[Path, Any], tmp_path: Path) -> Iterator[Host]:
    folder, twin = twin_folder
    cache = folder.parent / "cache"
    made = Host(load_model(folder, name="m", page_size=16, cache=cache), twin, tmp_path)
    yield made
    made.executor.close()
    made.file.remove()


def key_of(lease: int, choice: int = 0) -> SequenceKey:
    return SequenceKey(request=f"{lease:032x}", attempt=1, choice=choice)


def make_row(
    lease: int, table: U32, tokens: U32, start: int, count: int, *,
    sampling: Sampling | None = None, granted_at: int = 5,
) -> StepRow:  # fmt: skip
    """Tokens ``[start, start + count)``; draws when they are the last and it is told how."""
    key = key_of(lease)
    seen = tokens[: start + count]
    samples = () if sampling is None else (Sample(key, sampling, seen, len(seen)),)
    return StepRow(
        key=key, lease=lease, lease_slot=lease, granted_at=granted_at, page_table=table,
        tokens=tokens[start : start + count], start=start, samples=samples,
    )  # fmt: skip


def expected(host: Host, tokens: U32) -> torch.Tensor:
    """Log-probabilities [tokens, vocab] by ``transformers``."""
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        logits: torch.Tensor = host.twin(ids).logits[0]
    return logits.log_softmax(-1)


def generate(host: Host, lease: int, prompt: U32, chunks: list[int], count: int) -> list[RowResult]:
    """A sequence alone: its prompt in ``chunks``, then ``count`` drawn tokens."""
    table = host.grant(lease, len(prompt) + count)
    tokens, out, start = prompt, [], 0
    for size in chunks:
        last = start + size == len(prompt)
        row = make_row(lease, table, tokens, start, size, sampling=GREEDY if last else None)
        (result,) = host.run(row).rows
        start += size
    while True:
        out.append(result)
        tokens = np.append(tokens, np.uint32(result.drawn[0].token))
        if len(out) == count:
            return out
        (result,) = host.run(make_row(lease, table, tokens, start, 1, sampling=GREEDY)).rows
        start += 1


def test_a_prompt_in_chunks_then_tokens_follow_transformers(host: Host) -> None:
    prompt = some_tokens(75, vocab=VOCAB)
    results = generate(host, 1, prompt, [40, 1, 34], 12)
    drawn = [result.drawn[0] for result in results]
    tokens = np.append(prompt, [one.token for one in drawn]).astype(np.uint32)
    wanted = expected(host, tokens)[len(prompt) - 1 : -1]
    for one, row in zip(drawn, wanted, strict=True):
        assert one.scores is not None
        assert float(row[one.token]) >= float(row.max()) - 1e-4
        chosen = float(np.frombuffer(one.scores.chosen, np.float32)[0])
        assert chosen == pytest.approx(float(row[one.token]), abs=1e-4)
        assert len(np.frombuffer(one.scores.top_tokens, np.uint32)) == 2


def test_tokens_and_scores_have_the_same_bits_whatever_the_chunks(host: Host) -> None:
    prompt = some_tokens(60, vocab=VOCAB)
    first = generate(host, 1, prompt, [60], 6)
    second = generate(host, 1, prompt, [7, 16, 37], 6)
    assert first == second


def test_rows_of_a_mixed_step_get_what_they_get_alone(host: Host) -> None:
    prompts = {lease: some_tokens(20 + lease, vocab=VOCAB, seed=lease) for lease in (1, 2, 3)}
    alone = {lease: generate(host, lease, prompt, [len(prompt)], 1)[0]
             for lease, prompt in prompts.items()}  # fmt: skip
    tables = {lease: host.grant(lease, 64) for lease in prompts}
    host.run(make_row(2, tables[2], prompts[2], 0, 21))
    rows = [
        make_row(1, tables[1], prompts[1], 0, 21, sampling=GREEDY),
        make_row(2, tables[2], prompts[2], 21, 1, sampling=GREEDY),
        make_row(3, tables[3], prompts[3], 0, 23, sampling=GREEDY),
    ]
    assert {row.lease: row for row in host.run(*rows).rows} == alone


def test_choices_that_fork_draw_from_one_row(host: Host) -> None:
    prompt, table = some_tokens(30, vocab=VOCAB), host.grant(1, 40)
    row = make_row(1, table, prompt, 0, 30)
    hot = Sampling(temperature=1.5, seed=9, max_tokens=4)
    samples = tuple(Sample(key_of(1, choice), hot, prompt, 30) for choice in range(6))
    (result,) = host.run(replace(row, samples=samples)).rows
    assert [one.key.choice for one in result.drawn] == list(range(6))
    assert len({one.token for one in result.drawn}) > 1


def test_copied_pages_continue_like_their_source(host: Host) -> None:
    prompt = some_tokens(21, vocab=VOCAB)
    table, forked = host.grant(1, 32), host.grant(2, 32)
    host.run(make_row(1, table, prompt, 0, 20))
    child = np.array([table[0], forked[1]], np.uint32)
    mother = make_row(1, table, prompt, 20, 1, sampling=GREEDY)
    sister = make_row(2, child, prompt, 20, 1, sampling=GREEDY)
    result = host.run(mother, sister, copies=((int(table[1]), int(forked[1])),))
    assert result.rows[0].drawn[0].token == result.rows[1].drawn[0].token
    assert result.rows[0].drawn[0].scores == result.rows[1].drawn[0].scores


def test_a_plan_of_copies_alone_copies(host: Host) -> None:
    source, target = (int(page) for page in host.grant(1, 32))
    host.pool.pages.keys(0)[source] = 3.0
    assert host.run(copies=((source, target),)).rows == ()
    assert torch.equal(host.pool.pages.keys(0)[target], host.pool.pages.keys(0)[source])


def test_prompt_scores_in_chunks_are_the_models(host: Host) -> None:
    prompt, table = some_tokens(150, vocab=VOCAB), host.grant(1, 160)
    chosen: list[float] = []
    start = 0
    for size in (1, 90, 58, 1):
        end = start + size
        row = replace(
            make_row(1, table, prompt, start, size, sampling=GREEDY if end == 150 else None),
            score_from=0, score_width=3, score_next=int(prompt[end]) if end < 150 else None,
        )  # fmt: skip
        scores = host.run(row).rows[0].prompt_scores
        assert scores is not None
        part = np.frombuffer(scores.chosen, np.float32)
        assert len(np.frombuffer(scores.top_values, np.float32)) == 3 * len(part)
        chosen += part.tolist()
        start = end
    rows = expected(host, prompt)[:-1]
    wanted = rows[torch.arange(149), torch.from_numpy(prompt[1:].astype(np.int64))]
    assert chosen == pytest.approx(wanted.tolist(), abs=1e-4)


def test_scoring_starts_where_it_is_asked_to(host: Host) -> None:
    prompt, table = some_tokens(40, vocab=VOCAB), host.grant(1, 48)
    row = replace(make_row(1, table, prompt, 0, 40, sampling=GREEDY), score_from=25)
    scores = host.run(row).rows[0].prompt_scores
    assert scores is not None
    assert len(scores.chosen) == 4 * 14


def test_a_lease_revoked_before_the_step_is_neither_written_nor_answered(host: Host) -> None:
    prompt = some_tokens(20, vocab=VOCAB)
    tables = [host.grant(1, 20), host.grant(2, 20)]
    host.file.headers.set_lease_word(1, 0)
    rows = [make_row(lease, tables[lease - 1], prompt, 0, 20, sampling=GREEDY) for lease in (1, 2)]
    result = host.run(*rows)
    assert [row.revoked for row in result.rows] == [True, False]
    assert result.rows[0].drawn == ()
    assert not host.pool.pages.keys(0)[tables[0].astype(np.int64)].any()
    assert host.pool.pages.keys(0)[tables[1].astype(np.int64)].any()


class Meddler(Decoder):
    """A decoder during whose pass something happens to the pool."""

    def __init__(self, model: LoadedModel, action: Any) -> None:
        super().__init__(model.config, model.weights, deterministic=True)
        self._action = action

    def step(self, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        out = super().step(*arguments, **options)
        self._action()
        return out


def meddled(host: Host, action: Any) -> RowResult:
    """One row's result when ``action`` happens while it is computed."""
    table = host.grant(1, 20)
    meddler = Meddler(host.model, lambda: action(table))
    host.executor = ModelExecutor(meddler, host.model.layout)
    host.executor.use(host.pool)
    prompt = some_tokens(20, vocab=VOCAB)
    return host.run(make_row(1, table, prompt, 0, 20, sampling=GREEDY)).rows[0]


def test_a_lease_revoked_during_the_step_gives_no_tokens(host: Host) -> None:
    result = meddled(host, lambda _: host.file.headers.set_lease_word(1, 99))
    assert result.revoked and not result.drawn


def test_a_page_given_out_anew_during_the_first_step_gives_no_tokens(host: Host) -> None:
    result = meddled(host, lambda table: host.publish(table[1:], 6))
    assert result.revoked and not result.drawn


@pytest.mark.parametrize("sequence", [6, 1 << 50])
def test_a_page_of_a_later_grant_is_refused_before_it_is_read(host: Host, sequence: int) -> None:
    prompt, table = some_tokens(20, vocab=VOCAB), host.grant(1, 20)
    host.publish(table[:1], sequence)
    row = make_row(1, table, prompt, 0, 20, sampling=GREEDY)
    assert host.run(row).rows[0].revoked
    assert not host.run(replace(row, granted_at=sequence)).rows[0].revoked


def test_a_pool_that_is_not_the_one_named_is_refused(host: Host) -> None:
    layout = host.model.layout
    for wrong in (
        {"pool_incarnation": 78},
        {"page_count": PAGE_COUNT - 1},
    ):
        fields = {name: getattr(host.opened, name) for name in host.opened.__struct_fields__}
        with pytest.raises(Stale, match="not the pool"):
            WorkerPool.attach(SessionOpened(**(fields | wrong)), layout)
    with pytest.raises(Stale, match="not the pool"):
        WorkerPool.attach(host.opened, replace(layout, page_size=8))


def test_a_step_without_a_pool_is_a_bug(host: Host) -> None:
    with pytest.raises(RuntimeError, match="before any pool"):
        ModelExecutor(host.decoder, host.model.layout).run(StepPlan(1, ()))


def test_values_that_are_no_numbers_poison_the_row_that_reads_them_and_no_other(host: Host) -> None:
    prompts = {lease: some_tokens(40, vocab=VOCAB, seed=lease) for lease in (1, 2)}
    tables = {lease: host.grant(lease, 48) for lease in prompts}
    for lease, prompt in prompts.items():
        host.run(make_row(lease, tables[lease], prompt, 0, 39))
    rows = [
        make_row(lease, tables[lease], prompts[lease], 39, 1, sampling=GREEDY) for lease in (1, 2)
    ]
    clean = host.run(*rows).rows
    host.pool.pages.values(0)[int(tables[2][0])] = float("nan")
    first, second = host.run(*rows).rows
    assert first == clean[0] and not first.poisoned
    assert second.poisoned


def test_what_a_page_held_before_poisons_nobody(host: Host) -> None:
    prompt = some_tokens(40, vocab=VOCAB)
    clean = generate(host, 1, prompt, [16, 24], 3)
    table = host.grant(2, 43)
    for layer in range(host.model.config.layer_count):
        host.pool.pages.keys(layer)[table.astype(np.int64)] = float("nan")
        host.pool.pages.values(layer)[table.astype(np.int64)] = float("nan")
    start, tokens = 0, prompt
    for size in (16, 24):
        last = start + size == len(prompt)
        row = make_row(2, table, tokens, start, size, sampling=GREEDY if last else None)
        (result,) = host.run(row).rows
        start += size
    assert result.drawn[0].token == clean[0].drawn[0].token and not result.poisoned
