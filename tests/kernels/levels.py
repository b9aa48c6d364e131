"""The instruction sets this machine has, for tests that run on each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagemesh.kernels.native.library import CpuLevel, library

LEVELS = [level for level in CpuLevel if level <= library().pm_best_level()]


@pytest.fixture(params=LEVELS, ids=lambda level: level.name.lower())
def level(request: pytest.FixtureRequest) -> Iterator[CpuLevel]:
    """The level that native kernels run at during the test."""
    before = library().pm_level()
    assert library().pm_set_level(request.param) == 0
    yield request.param
    library().pm_set_level(before)
