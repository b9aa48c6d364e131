"""Fixtures of gateway tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.unit.gateway.fake_mesh import FakeMesh, fake_mesh
from tests.unit.gateway.routes import SECRET
from tests.unit.gateway.support import write_model

from pagemesh.gateway.routing.router import Router, RouterLimits
from pagemesh.runtime.nats_server import NatsServer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a byte-level tokenizer and a chat template."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def mesh(shared_nats_server: NatsServer, model_folder: Path) -> AsyncIterator[FakeMesh]:
    """A gateway with one fake decode worker."""
    async with fake_mesh(shared_nats_server.url, model_folder) as made:
        yield made


@pytest.fixture
def router() -> Iterator[Router]:
    """A router that knows no workers yet; it is checked at the end."""
    made = Router(SECRET, RouterLimits(short_suffix_tokens=64))
    yield made
    made.check()
