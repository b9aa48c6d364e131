"""What is drawn in a run where logits are equal, or no numbers: as in steps one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.unit.engine.runs import (
    GREEDY,
    HOT,
    LONG_US,
    all_tokens,
    call,
    load_twin,
    one_by_one,
    plan_of,
)
from tests.unit.engine.test_executor import Host

from pagemesh.engine.worker.plan import Ahead
from pagemesh.wire.work_messages import Sampling


@contextmanager
def host_of(folder: Path, edit_head: Callable[[torch.Tensor], None]) -> Iterator[Host]:
    made = Host(*load_twin(folder, edit_head), folder)
    yield made
    made.executor.close()
    made.file.remove()


def test_of_equal_logits_the_first_is_drawn(tmp_path: Path) -> None:
    def pair(head: torch.Tensor) -> None:
        head[1:-1:2] = head[0:-1:2]

    with host_of(tmp_path, pair) as host:
        plan = plan_of(host, GREEDY, GREEDY, repeat_count=10)
        tokens = all_tokens(call(host, plan))
        assert len(tokens[0]) == 11 and tokens == all_tokens(one_by_one(host, plan))
        assert not any(token % 2 for own in tokens for token in own)


def one_is_none(head: torch.Tensor) -> None:
    head[7] = float("nan")


def some_are_endless(head: torch.Tensor) -> None:
    width = head.shape[1]
    head[: 2 * width] = torch.cat((torch.eye(width), -torch.eye(width))) * 3e38


@pytest.mark.parametrize("edit_head", [one_is_none, some_are_endless])
@pytest.mark.parametrize(
    "samplings", [(GREEDY,), (HOT,), (GREEDY, HOT)], ids=["greedy", "hot", "mixed"]
)
def test_logits_of_which_some_are_no_finite_numbers_end_a_run(
    tmp_path: Path, edit_head: Callable[[torch.Tensor], None], samplings: tuple[Sampling, ...]
) -> None:
    with host_of(tmp_path, edit_head) as host:
        plan = plan_of(host, *samplings, repeat_count=10)
        result = host.executor.run_on(plan, Ahead(LONG_US))
        assert len(result.took_us) == 1 and all(row.poisoned for row in result.rows)
