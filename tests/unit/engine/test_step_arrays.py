"""Arrays that are kept from step to step hold what fresh ones would hold."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from pagemesh.engine.step_arrays import ArrayKeeper, StepArrays, made
from pagemesh.engine.worker.plan import Sample, StepRow
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.work_messages import Sampling

SIZE = 4


def make_row(lease: int, start: int, count: int = 1, *, pages: int = 5) -> StepRow:
    key = SequenceKey(request=f"{lease:032x}", attempt=1, choice=0)
    tokens = np.arange(start, start + count, dtype=np.uint32) + 100 * lease
    table = np.random.default_rng(lease).permutation(64)[:pages].astype(np.uint32)
    return StepRow(
        key=key, lease=lease, lease_slot=lease, granted_at=1, page_table=table, tokens=tokens,
        start=start, samples=(Sample(key, Sampling(max_tokens=64), tokens, 0),),
    )  # fmt: skip


def after(row: StepRow) -> StepRow:
    """The row of the next step, as the worker makes it: the same page table, one token on."""
    start = row.start + len(row.tokens)
    tokens = np.array([start + 100 * row.lease], np.uint32)
    return replace(row, start=start, tokens=tokens)


def is_fresh(kept: StepArrays, rows: list[StepRow]) -> None:
    fresh = made(rows, SIZE)
    for name in ("tokens", "wanted"):
        assert torch.equal(getattr(kept, name), getattr(fresh, name)), name
    for field in fields(fresh.batch):
        got, wanted = getattr(kept.batch, field.name), getattr(fresh.batch, field.name)
        assert torch.equal(got, wanted), field.name
        assert got.dtype == wanted.dtype
    assert kept.ends.tolist() == fresh.ends.tolist()
    assert kept.scoring == fresh.scoring


def test_single_tokens_go_on_in_the_same_arrays() -> None:
    keeper, rows = ArrayKeeper(SIZE), [make_row(lease, 3 * lease) for lease in (1, 2, 3)]
    first = keeper.arrays(rows)
    is_fresh(first, rows)
    for _ in range(8):  # over borders of pages
        rows = [after(row) for row in rows]
        kept = keeper.arrays(rows)
        assert kept is first
        is_fresh(kept, rows)


def test_whoever_joins_leaves_or_gets_other_pages_is_seen() -> None:
    keeper, rows = ArrayKeeper(SIZE), [make_row(lease, 6) for lease in (1, 2)]
    keeper.arrays(rows)
    joined = [*map(after, rows), make_row(3, 9)]
    is_fresh(keeper.arrays(joined), joined)
    left = [after(joined[0]), after(joined[2])]
    is_fresh(keeper.arrays(left), left)
    grown = [replace(after(left[0]), page_table=make_row(9, 0, pages=6).page_table), left[1]]
    is_fresh(keeper.arrays(grown), grown)


def test_chunks_and_scores_between_single_tokens_are_made_anew() -> None:
    keeper, row = ArrayKeeper(SIZE), make_row(1, 5)
    keeper.arrays([row])
    for rows in (
        [after(row), make_row(2, 0, 7)],
        [replace(make_row(2, 0, 7), score_from=2, samples=())],
        [replace(make_row(2, 0, 7), samples=())],
        [after(row)],
    ):
        is_fresh(keeper.arrays(rows), rows)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_page_table_that_is_too_short_is_refused(steps: int) -> None:
    keeper, row = ArrayKeeper(SIZE), make_row(1, 2 * SIZE - steps, pages=2)
    for _ in range(steps):
        keeper.arrays([row])
        row = after(row)
    with pytest.raises((IndexError, ValueError)):
        keeper.arrays([row])
