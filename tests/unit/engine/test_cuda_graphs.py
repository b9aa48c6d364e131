"""Which steps have a graph: buckets, and who makes room for whom. Captures are faked."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from pagemesh.engine.cuda.graph_bytes import (
    CHUNK_ROWS_MAX,
    GRAPH_COUNT_MAX,
    PROMPTS_MAX,
    ROWS_MAX,
    context_bytes_max,
    graph_bytes_max,
    logits_bytes_beyond,
    rows_held,
)
from pagemesh.engine.cuda.graphs import (
    STOOD_IN_MIN,
    WANTED_MIN,
    Bucket,
    Step,
    StepGraphs,
    bucket_of,
    common_buckets,
)
from pagemesh.engine.cuda.launches import Launch


class Captures:
    """Captures nothing, and keeps count; ``room``: how many there is memory for at once."""

    def __init__(self, room: int = 10**6) -> None:
        self.done: list[Bucket] = []
        self.room = room

    def __call__(self, bucket: Bucket) -> Step:
        if len(self.done) >= self.room:
            raise torch.cuda.OutOfMemoryError("no memory")
        self.done.append(bucket)

        def step(words: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            raise AssertionError("nothing was captured")

        return step


def buckets(count: int) -> list[Bucket]:
    """Of which none stands in for another."""
    return [Bucket(8 * (index + 1), 4 ** (count - index)) for index in range(count)]


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 17, 63, 64, 65, 200, ROWS_MAX])
def test_a_bucket_holds_its_step_and_not_much_more(rows: int) -> None:
    bucket = bucket_of(rows, 4)
    assert bucket is not None
    assert rows <= bucket.rows < max(2 * rows, rows + 8, rows + 16 * (rows > 64))
    shape = bucket.shape(77, 64)
    assert (shape.rows, shape.wanted, shape.pages) == (bucket.rows, bucket.rows, 77)
    assert (shape.blocks, bucket.launches) == (0, (Launch(0, bucket.rows, 4),))


@pytest.mark.parametrize("chunk", [1, 16, 17, 64, 65, 300, 700, CHUNK_ROWS_MAX])
@pytest.mark.parametrize("rows", [0, 1, 8, 9, 100, ROWS_MAX])
def test_a_bucket_holds_prompts_beside_rows_of_others(rows: int, chunk: int) -> None:
    bucket = bucket_of(rows, 4, chunk)
    assert bucket is not None
    padded = 1.5 * chunk if not rows else 4 * chunk if chunk <= 64 else 2 * chunk
    assert chunk <= bucket.chunk < max(padded, chunk + 16)
    assert rows <= bucket.rows < max(2 * rows, rows + 8)
    shape = bucket.shape(77, 32)
    assert shape.rows == bucket.rows + bucket.chunk
    assert shape.wanted == shape.sequences == bucket.rows + PROMPTS_MAX
    starts = np.linspace(0, chunk, min(chunk, PROMPTS_MAX) + 1).astype(int)
    assert sum(-(-count // 32) for count in np.diff(starts)) <= shape.blocks
    assert bucket.launches == ((Launch(0, bucket.rows, 4),) if rows else ())


def test_no_graph_has_more_rows_of_prompts_than_it_is_worth() -> None:
    assert bucket_of(3, 1, CHUNK_ROWS_MAX + 1) is None
    assert bucket_of(ROWS_MAX + 1, 1, 16) is None
    assert bucket_of(0, 16, 5) == bucket_of(0, 1, 5), "of rows that there are none"


def test_steps_of_many_lengths_share_few_buckets() -> None:
    assert bucket_of(ROWS_MAX + 1, 1) is None
    assert bucket_of(0, 1) is None
    assert len({bucket_of(rows, 1) for rows in range(1, ROWS_MAX + 1)}) == 23


def test_common_buckets_are_fewer_than_there_may_be_and_none_larger_than_steps_are() -> None:
    common = common_buckets(ROWS_MAX, 512)
    assert len(common) == len(set(common)) == 76 < GRAPH_COUNT_MAX
    few = [bucket for bucket in common_buckets(3, 2) if not bucket.chunk]
    assert few == [Bucket(rows, spans) for rows in (1, 2, 4) for spans in (1, 4)]
    beside = [bucket for bucket in common_buckets(3, 2) if bucket.chunk and bucket.rows]
    assert beside == [Bucket(8, 4, chunk) for chunk in (CHUNK_ROWS_MAX, 512, 256, 64)]
    prompts = [bucket for bucket in common if bucket.chunk and not bucket.rows]
    assert prompts == sorted(prompts, key=lambda bucket: -bucket.chunk)
    assert {(bucket.rows, bucket.spans) for bucket in prompts} == {(0, 1)}
    with_prompts = [bucket for bucket in common if bucket.chunk]
    assert common[: len(with_prompts)] == with_prompts
    assert common[0] == Bucket(ROWS_MAX, 4, CHUNK_ROWS_MAX), "in whose memory others find room"


@pytest.mark.parametrize("rows_max", [1, 8, 9, 16, 20, 32, 48, 64, 100, 128, ROWS_MAX])
def test_a_step_with_prompts_beside_others_never_waits_for_its_graph(rows_max: int) -> None:
    captures = Captures()
    graphs = StepGraphs(captures)
    graphs.prepare(common_buckets(rows_max, 512), seconds_max=1.0, now_s=lambda: 0.0)
    assert len(graphs) < GRAPH_COUNT_MAX
    captures.room = 0
    for rows, spans, chunk in itertools.product(
        range(1, rows_max + 1), (1, 4, 16), (1, 16, 17, 65, 100, 300, CHUNK_ROWS_MAX)
    ):
        bucket = bucket_of(rows, spans, chunk)
        assert bucket is not None
        found = graphs.step_for(bucket)
        assert found is not None
        assert found[0] == bucket or found[0].stands_in(bucket)


def test_one_stands_in_for_smaller_ones_of_its_kind_that_are_not_much_smaller() -> None:
    one = Bucket(32, 4, 256)
    assert one.stands_in(Bucket(8, 4, 64)) and one.stands_in(Bucket(32, 1, 256))
    assert not one.stands_in(Bucket(64, 4, 64)) and not one.stands_in(Bucket(8, 4, 512))
    assert not one.stands_in(Bucket(8, 16, 64)), "longer contexts"
    assert not one.stands_in(Bucket(0, 1, 256)) and not one.stands_in(Bucket(32, 4))
    assert not Bucket(8, 4, CHUNK_ROWS_MAX).stands_in(Bucket(8, 4, 64)), "mostly padding"


def test_the_smallest_one_stands_in_until_a_bucket_is_wanted_often() -> None:
    captures = Captures()
    graphs = StepGraphs(captures)
    large, larger, own = Bucket(32, 4, 64), Bucket(128, 4, 64), Bucket(16, 4, 64)
    graphs.prepare([larger, large], seconds_max=1.0, now_s=lambda: 0.0)
    found = [graphs.step_for(own) for _ in range(STOOD_IN_MIN)]
    assert [one[0] for one in found if one] == [large] * (STOOD_IN_MIN - 1) + [own]
    assert captures.done == [larger, large, own]


def test_one_that_may_not_stand_in_does_not() -> None:
    captures = Captures()
    graphs = StepGraphs(captures)
    large, own = Bucket(32, 4, 64), Bucket(16, 4, 64)
    graphs.prepare([large], seconds_max=1.0, now_s=lambda: 0.0)
    found = graphs.step_for(own, lambda bucket: bucket != large)
    assert found is not None and found[0] == own


def test_without_memory_for_its_own_graph_a_larger_one_goes_on_standing_in() -> None:
    graphs = StepGraphs(Captures(room=1))
    large, own = Bucket(32, 4, 64), Bucket(16, 4, 64)
    graphs.prepare([large], seconds_max=1.0, now_s=lambda: 0.0)
    found = [graphs.step_for(own) for _ in range(5 * STOOD_IN_MIN)]
    assert {one and one[0] for one in found} == {large}
    assert graphs.step_for(large) is not None and len(graphs) == 1


def test_a_graph_that_was_captured_serves_again() -> None:
    captures = Captures()
    graphs = StepGraphs(captures)
    [bucket] = buckets(1)
    found = graphs.step_for(bucket)
    assert found is not None and graphs.step_for(bucket) == found
    assert captures.done == [bucket]


def test_the_least_recently_used_makes_room_for_what_is_wanted_often() -> None:
    captures = Captures()
    graphs = StepGraphs(captures, count_max=3)
    first, second, third, new = buckets(4)
    for bucket in (first, second, third, first):
        assert graphs.step_for(bucket) is not None
    for _ in range(WANTED_MIN - 1):
        assert graphs.step_for(new) is None, "a capture takes as long as it saves in some steps"
    assert graphs.step_for(new) is not None
    assert len(graphs) == 3
    for bucket in (first, third, new):
        assert graphs.step_for(bucket) is not None
    assert captures.done == [first, second, third, new]
    assert graphs.step_for(second) is None


def test_a_load_that_changes_for_good_runs_on_graphs_again() -> None:
    graphs = StepGraphs(Captures(), count_max=4)
    every = buckets(8)
    missed = [0, 0]
    for phase, own in enumerate((every[:4], every[4:])):
        for bucket in itertools.islice(itertools.cycle(own), 400):
            missed[phase] += graphs.step_for(bucket) is None
    assert missed == [0, 4 * (WANTED_MIN - 1)]


def test_without_memory_for_another_steps_go_on_with_the_graphs_there_are() -> None:
    captures = Captures(room=2)
    graphs = StepGraphs(captures)
    first, second, third = buckets(3)
    assert graphs.step_for(first) is not None and graphs.step_for(second) is not None
    for _ in range(10 * WANTED_MIN):
        assert graphs.step_for(third) is None
    assert len(graphs) == 2, "none was thrown away for one that does not fit"
    assert graphs.step_for(first) is not None and graphs.step_for(second) is not None


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling it",
    ],
)
def test_memory_that_the_driver_has_not_ends_no_worker(words: str) -> None:
    def capture(_bucket: Bucket) -> Step:
        raise RuntimeError(words)

    graphs = StepGraphs(capture)
    assert graphs.step_for(buckets(1)[0]) is None


def test_what_fails_for_another_reason_is_told() -> None:
    def capture(_bucket: Bucket) -> Step:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        StepGraphs(capture).step_for(buckets(1)[0])


def test_without_memory_for_any_no_further_capture_is_tried() -> None:
    captures = Captures(room=0)
    graphs = StepGraphs(captures)
    assert [graphs.step_for(bucket) for bucket in buckets(3) for _ in range(50)] == [None] * 150
    captures.room = 10
    assert [graphs.step_for(bucket) for bucket in buckets(3) for _ in range(50)] == [None] * 150


def test_what_is_captured_before_work_is_bounded_in_time_and_number() -> None:
    seconds = itertools.count()
    graphs = StepGraphs(Captures())
    assert graphs.prepare(buckets(20), seconds_max=5.0, now_s=lambda: float(next(seconds))) == 4
    few: Any = StepGraphs(Captures(), count_max=3)
    assert few.prepare(buckets(20), seconds_max=5.0, now_s=lambda: 0.0) == 3


def test_logits_are_most_of_what_graphs_take_and_are_counted_once() -> None:
    sizes = {"hidden_size": 4096, "item_bytes": 2}
    large = graph_bytes_max(sequence_count_max=256, vocab_tokens=128_000, **sizes)
    small = graph_bytes_max(sequence_count_max=256, vocab_tokens=0, **sizes)
    assert large - small == (256 + PROMPTS_MAX) * 128_000 * 6
    assert large < 1 << 30
    beyond = graph_bytes_max(sequence_count_max=4096, vocab_tokens=128_000, **sizes)
    assert beyond == large, "no graph has more rows"
    more = {"vocab_tokens": 128_000, "item_bytes": 2}
    assert logits_bytes_beyond(sequence_count_max=256, **more) == 0
    assert logits_bytes_beyond(sequence_count_max=4096, **more) == 4096 * 128_000 * 6


def test_long_contexts_take_rotations_and_page_tables() -> None:
    sizes = {"sequence_count_max": 256, "page_size": 16, "head_dim": 128}
    assert context_bytes_max(context_tokens_max=16, **sizes) == 16 * 512 + (256 + PROMPTS_MAX) * 4
    million = context_bytes_max(context_tokens_max=1 << 20, **sizes)
    assert million == (512 << 20) + (256 + PROMPTS_MAX) * (1 << 16) * 4


def test_there_is_room_for_the_rows_of_every_bucket() -> None:
    for rows in range(1, ROWS_MAX + 1):
        alone, beside = bucket_of(rows, 1), bucket_of(rows, 1, 1)
        assert alone is not None and beside is not None
        assert max(alone.rows, beside.rows) <= rows_held(rows)
