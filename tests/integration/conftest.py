"""A tiny model for whole meshes: written, and its weights prepared, once for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from tests.integration.mesh import Mesh
from tests.integration.tiny_model import write_tiny_llama
from tests.support.leaks import pool_files


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def prepared_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture(autouse=True)
def weights_are_prepared_once(tmp_path: Path, prepared_weights: Path) -> None:
    """Share prepared weights, which a mesh keeps beside its pools. Making them takes two processes
    some seconds each, and the first mesh of every model tests that."""
    (tmp_path / "prepared").symlink_to(prepared_weights)


@pytest.fixture(scope="module")
def module_pool_dir(
    tmp_path_factory: pytest.TempPathFactory, prepared_weights: Path
) -> Iterator[Path]:
    """``pool_dir`` for a mesh that serves all tests of a module."""
    folder = tmp_path_factory.mktemp("module")
    (folder / "prepared").symlink_to(prepared_weights)
    (folder / "pools").mkdir(mode=0o700)
    yield folder / "pools"
    assert not pool_files(folder / "pools"), "left behind"


@pytest.fixture
def client(mesh: Mesh) -> Iterator[OpenAI]:
    """Asks the ``mesh`` of the test's module."""
    with OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made
