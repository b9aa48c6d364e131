"""Machines that run many examples may take hours."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.machine.examples import IS_LONG

LONG_S = 6 * 3_600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if IS_LONG:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.timeout(LONG_S))
