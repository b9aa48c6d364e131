"""Keeps the environment of the user who runs the tests out of them."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("PAGEMESH_", "OTEL_"))]:
        monkeypatch.delenv(name)
