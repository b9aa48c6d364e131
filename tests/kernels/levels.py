"""The instruction sets, for tests that run on each that this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagemesh.kernels.native.library import CpuLevel, library

LEVELS = [level for level in CpuLevel if level <= library().pm_best_level()]
"""The levels that this machine has."""

_LACKING = {
    level: pytest.mark.skip(reason=f"this machine has no {level.name}")
    for level in CpuLevel
    if level not in LEVELS
}
EVERY_LEVEL = [
    pytest.param(level, id=level.name.lower(), marks=_LACKING.get(level, ())) for level in CpuLevel
]
"""All levels as parameters of tests. Those that this machine lacks are skipped, so that a report
names them."""


@pytest.fixture(params=EVERY_LEVEL)
def level(request: pytest.FixtureRequest) -> Iterator[CpuLevel]:
    """The level that native kernels run at during the test."""
    before = library().pm_level()
    assert library().pm_set_level(request.param) == 0
    yield request.param
    library().pm_set_level(before)
