"""Every test that uses ``level`` runs on each instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.kernels.levels import level

__all__ = ["level", "same_random_numbers", "with_threads"]


@pytest.fixture
def with_threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads that kernels may use, until the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)
