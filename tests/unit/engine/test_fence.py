"""Whether the pages of a step are still what its rows were granted, and when that is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from pagemesh.engine.executor import Fence
from pagemesh.engine.pool import WorkerPool
from pagemesh.engine.worker.plan import StepRow
from pagemesh.wire.messages import SequenceKey


class Pool:
    """Says of leases and pages what a test wants, and notes whose pages it was asked for."""

    def __init__(self) -> None:
        self.stands = self.fresh = True
        self.asked: list[int] = []

    def watch(self, _slots: list[int], leases: list[int]) -> SimpleNamespace:
        return SimpleNamespace(standing=lambda: [self.stands for _ in leases])

    def is_fresh(self, row: StepRow) -> bool:
        self.asked.append(row.granted_at)
        return self.fresh


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def fence(pool: Pool) -> Fence:
    return Fence(cast(WorkerPool, pool))


def granted(at: int) -> list[StepRow]:
    """The row of a lease whose last pages came at ``at``."""
    key, nothing = SequenceKey(request="0" * 32, attempt=1, choice=0), np.zeros(0, "<u4")
    return [StepRow(key, 7, 7, at, nothing, nothing, 0, ())]


def test_pages_are_looked_at_again_when_more_were_granted(fence: Fence, pool: Pool) -> None:
    for at in (1, 2):
        assert fence.leave(granted(at), fence.enter(granted(at))) == [True]
        assert set(pool.asked) == {at}
        pool.asked.clear()
        assert fence.enter(granted(at)) == [True]
        assert pool.asked == [], "the step before had checked them"
    pool.fresh = False
    assert fence.enter(granted(3)) == [False]


@pytest.mark.parametrize("what", ["stands", "fresh"])
def test_what_did_not_stand_before_a_step_does_not_after_it(
    fence: Fence, pool: Pool, what: str
) -> None:
    setattr(pool, what, False)
    stood = fence.enter(granted(1))
    setattr(pool, what, True)
    assert fence.leave(granted(1), stood) == [False]
    pool.asked.clear()
    assert fence.enter(granted(1)) == [True] and pool.asked == [1], "it was never checked"
