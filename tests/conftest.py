"""Fixtures for all tests: a real nats-server, buses to it, a real trace receiver, leak checks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import uvloop
from hypothesis import HealthCheck, settings
from tests.support.leaks import own_descendants, pool_files
from tests.support.otlp import Receiver, ReceiverServer
from tests.support.time_limits import limit_processor_time

from pagemesh.runtime import compiled
from pagemesh.runtime.bus import Bus
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.settings import BusConfig

# Tests may patch a core, so in this process cores are interpreted. The meshes that tests start use
# the compiled core, as users do, and so do the tests that test_compiled_cores.py runs.
with pytest.MonkeyPatch.context() as environ:
    if not os.environ.get(compiled.VARIABLE):
        environ.setenv(compiled.VARIABLE, "0")
    import pagemesh.pager

# Kernels for a GPU run in Triton's interpreter, which is chosen when triton is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

# The duration of an example depends on how busy the machine is, and on a fresh clone the first text
# takes a second, since hypothesis reads Unicode's tables. Every test has a time limit anyway.
settings.register_profile("pagemesh", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pagemesh")

AsyncTest = Callable[..., Coroutine[Any, Any, None]]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run tests on the event loop that services use."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give async tests a time limit of their own: uvloop does not let through the signal by which
    pytest-timeout ends a hanging test."""
    for item in items:
        if pagemesh.pager.IS_COMPILED and item.get_closest_marker("sources"):
            item.add_marker(pytest.mark.skip("changes a core, which runs compiled"))
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            marker = item.get_closest_marker("timeout")
            limit_s = marker.args[0] if marker and marker.args else config.getini("timeout")
            item.obj = _limited(item.obj, float(limit_s))


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Make the time limit of Hypothesis tests count processor time."""
    if item.get_closest_marker("hypothesis") is None:
        return None
    limit_processor_time(item, settings.timeout)
    return True


def _limited(test: AsyncTest, limit_s: float) -> AsyncTest:
    @functools.wraps(test)
    async def run(*arguments: Any, **named: Any) -> None:
        async with asyncio.timeout(limit_s):
            await test(*arguments, **named)

    return run


@pytest.fixture(autouse=True)
def unconfigured_logs() -> Iterator[None]:
    """Undo a test's logging configuration at its end: its stream may be closed by then."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def shared_nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One server shared by all tests that neither stop nor fill it."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server of the test's own, to freeze, thaw, kill and start again."""
    with NatsServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def bus(shared_nats_server: NatsServer) -> AsyncIterator[Bus]:
    """A bus connected to the shared server."""
    async with Bus.connect(
        BusConfig(url=shared_nats_server.url), role="client", name="test"
    ) as made:
        yield made


@pytest.fixture
def trace_receiver() -> Iterator[Receiver]:
    """A real OTLP/HTTP receiver; its ``url`` is an endpoint to export to."""
    with ReceiverServer() as receiver:
        yield receiver


@pytest.fixture
def no_stray_processes() -> Iterator[None]:
    """Fails the test if a process that it started outlives it."""
    before = set(own_descendants())
    yield
    stray = {pid: line for pid, line in own_descendants().items() if pid not in before}
    assert not stray, f"left running: {stray}"


@pytest.fixture
def pool_dir(tmp_path: Path) -> Iterator[Path]:
    """A pool folder of the test's own; fails the test if pool or lock files are left in it."""
    folder = tmp_path / "pools"
    folder.mkdir(mode=0o700)
    yield folder
    left = pool_files(folder)
    with contextlib.suppress(OSError):
        for path in left:
            path.unlink()
    assert not left, f"left behind: {sorted(path.name for path in left)}"
