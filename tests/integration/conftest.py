"""A tiny model for whole meshes; written once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.tiny_model import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
