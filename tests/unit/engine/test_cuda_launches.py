"""Which rows of a step attend by themselves, in what launches, and which by blocks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagemesh.engine.cuda.graph_bytes import STATES_BYTES_MAX
from pagemesh.engine.cuda.launches import (
    ALIGNED_ROWS,
    CHUNK_ROWS_MIN,
    IDLE_SPANS_MAX,
    Launch,
    StepRows,
    split_rows,
)
from pagemesh.kernels.ops import ragged_batch

SPAN_TOKENS = 256
SPAN_BYTES = 4 * 32 * 129
"""Of 32 heads of 128."""
Part = tuple[int, int]
"""Where a sequence's rows begin, and how many they are."""


def blocks_of(starts: NDArray[np.int64]) -> NDArray[np.int32]:
    found = [
        (first, min(first + 32, end))
        for start, end in itertools.pairwise(starts.tolist())
        for first in range(start, end, 32)
    ]
    return np.array(found, np.int32).reshape(-1, 2)


def split(parts: list[Part]) -> StepRows:
    tables = [np.arange(-(-(start + count) // 16), dtype=np.uint32) for start, count in parts]
    starts, counts = zip(*parts, strict=True)
    batch = ragged_batch(tables, starts, counts, 16)
    return split_rows(batch, span_tokens=SPAN_TOKENS, span_bytes=SPAN_BYTES, blocks_of=blocks_of)


def test_a_decode_step_is_one_launch_in_its_own_order() -> None:
    found = split([(100, 1), (900, 1), (7, 1)])
    assert found.order is None and found.launches == (Launch(0, 3, 4),) and not len(found.blocks)


def test_a_prompt_alone_goes_by_blocks() -> None:
    found = split([(0, 70)])
    assert found.order is None and found.launches == ()
    assert found.blocks.tolist() == [[0, 32], [32, 64], [64, 70]]


def test_a_chunk_beside_many_single_tokens_reads_its_context_by_blocks() -> None:
    found = split([*[(500, 1)] * 100, (8_000, 512), *[(900, 1)] * 71])
    assert found.launches == (Launch(0, 171, 4),)
    assert found.blocks.tolist() == [[171 + 32 * i, 203 + 32 * i] for i in range(16)]
    assert found.order is not None
    assert found.order[171:].tolist() == list(range(100, 612))


def test_a_sequence_without_rows_changes_nothing() -> None:
    found = split([(0, 70), (40, 0)])
    assert found.launches == () and found.blocks.tolist() == [[0, 32], [32, 64], [64, 70]]


def test_one_long_context_takes_a_launch_of_its_own() -> None:
    found = split([*[(500, 1)] * 255, (100_000, 1)])
    assert found.order is not None and found.order[0] == 255
    assert found.launches == (Launch(0, 4, 1024), Launch(4, 256, 4))


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from([0, 200, 1_000, 70_000]), st.sampled_from([1, 2, 3, 4, 40])),
        min_size=1, max_size=40,
    )
)  # fmt: skip
def test_every_row_is_computed_once_and_no_launch_keeps_more_than_its_share(
    parts: list[Part],
) -> None:
    found = split(parts)
    rows = sum(count for _, count in parts)
    order = np.arange(rows) if found.order is None else found.order
    assert sorted(order.tolist()) == list(range(rows))
    sizes = np.repeat([count for _, count in parts], [count for _, count in parts])
    positions = np.concatenate([np.arange(start, start + count) for start, count in parts])
    end = 0
    for launch in found.launches:
        assert launch.first == end and end % ALIGNED_ROWS == 0
        end = launch.end
        own = order[launch.first : end]
        assert (sizes[own] < CHUNK_ROWS_MIN).all()
        assert positions[own].max() < launch.spans * SPAN_TOKENS
        if end - launch.first > ALIGNED_ROWS:
            assert launch.room * SPAN_BYTES <= STATES_BYTES_MAX
            needed = np.maximum(-(-(positions[own] + 1) // SPAN_TOKENS), 1)
            assert launch.room - 4 * needed.sum() <= IDLE_SPANS_MAX
    assert (sizes[order[end:]] >= CHUNK_ROWS_MIN).all()
    assert [row for first, last in found.blocks.tolist() for row in range(first, last)] == list(
        range(end, rows)
    )


@pytest.mark.parametrize("context", [131_000, 8_000])
def test_what_attention_keeps_of_many_long_contexts_is_bounded(context: int) -> None:
    found = split([(context, 1)] * 256)
    assert max(one.room for one in found.launches) * SPAN_BYTES <= STATES_BYTES_MAX
    assert found.launches[-1].end == 256
