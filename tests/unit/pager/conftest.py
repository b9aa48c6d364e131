"""A pager of sixteen pages and one worker, for most tests of this folder."""

from __future__ import annotations

import pytest
from tests.unit.pager.rig import Rig, Worker


@pytest.fixture
def rig() -> Rig:
    return Rig(16)


@pytest.fixture
def worker(rig: Rig) -> Worker:
    return Worker(rig, "w", 1)
