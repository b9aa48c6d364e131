"""A tiny model for whole meshes; written once for all tests, and its weights prepared once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.tiny_model import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def prepared_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture(autouse=True)
def weights_are_prepared_once(tmp_path: Path, prepared_weights: Path) -> None:
    """A mesh keeps prepared weights beside its pools. To make them takes two processes some
    seconds each, and the first mesh of every model shows that they can."""
    (tmp_path / "prepared").symlink_to(prepared_weights)
