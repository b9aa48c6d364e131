"""Every test that asks for ``level`` runs on each instruction set this machine has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from pagemesh.kernels.native.library import CpuLevel, library

LEVELS = [level for level in CpuLevel if level <= library().pm_best_level()]


@pytest.fixture(params=LEVELS, ids=lambda level: level.name.lower())
def level(request: pytest.FixtureRequest) -> Iterator[CpuLevel]:
    """The level that native kernels run at during the test."""
    before = library().pm_level()
    assert library().pm_set_level(request.param) == 0
    yield request.param
    library().pm_set_level(before)


@pytest.fixture
def with_threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads kernels may use, until the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)
