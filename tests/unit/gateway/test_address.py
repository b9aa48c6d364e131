"""The address of the HTTP door: refused early where it is taken, answered at late."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import httpx
import pytest
from tests.unit.gateway.fake_mesh import FakeMesh

from pagemesh.gateway import service
from pagemesh.gateway.calls.spec import RequestLimits
from pagemesh.gateway.doors.address import listen, take_address
from pagemesh.gateway.doors.http import HttpDoor
from pagemesh.runtime.ports import free_port
from pagemesh.runtime.service import Stop
from pagemesh.runtime.service_config import load_service_config
from pagemesh.runtime.settings import GatewayConfig
from pagemesh.wire.errors import ConfigError


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_taken_address_refuses_connections_until_it_is_listened_at(host: str) -> None:
    with contextlib.closing(take_address(host, 0)) as taken:
        address = taken.getsockname()[:2]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        listen(taken)
        socket.create_connection(address, timeout=5).close()
        with pytest.raises(ConfigError, match="stop what listens there"):
            take_address(*address)


def test_of_two_who_had_an_address_at_once_the_later_one_is_told() -> None:
    with (
        contextlib.closing(take_address("127.0.0.1", 0)) as sooner,
        contextlib.closing(take_address("127.0.0.1", sooner.getsockname()[1])) as later,
    ):
        listen(sooner)
        with pytest.raises(ConfigError, match="stop what listens there"):
            listen(later)


async def test_a_gateway_whose_address_is_taken_says_so_before_it_looks_for_the_bus(
    model_folder: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        environ = {
            "PAGEMESH_HTTP_PORT": str(port),
            "PAGEMESH_MODEL": str(model_folder),
            "PAGEMESH_NATS": f"nats://127.0.0.1:{free_port()}",  # it would be waited for
            "PAGEMESH_SECRET": "0123456789abcdef0123456789abcdef",
        }
        async with asyncio.timeout(10):
            with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*PAGEMESH_HTTP_PORT"):
                await service.run(load_service_config(environ, {}), Stop())


async def test_the_door_serves_at_the_address_that_was_taken_for_it(mesh: FakeMesh) -> None:
    await mesh.front.gateway.facts(RequestLimits())  # a worker has been heard of
    with contextlib.closing(take_address("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with HttpDoor(mesh.front, GatewayConfig(http_port=1)).serve(taken) as url:
            assert url == f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=url) as client:
                assert (await client.get("/health")).status_code == 200
