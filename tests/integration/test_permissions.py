"""A real server, started from the generated configuration, keeps roles apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagemesh.cli.mesh.plan_mesh import plan_nats
from pagemesh.cli.mesh.run_folder import run_folder
from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.settings import BusConfig
from pagemesh.wire import subjects
from pagemesh.wire.errors import ConfigError, Denied
from pagemesh.wire.subjects import BusRole


class Server:
    """The server of ``pagemesh up``, with its users."""

    def __init__(self, folder: Path) -> None:
        with run_folder(folder, "host") as made:
            self.plan = plan_nats(made)
            text = (made.path / "nats-server.conf").read_text()
        extra = text[text.index("authorization") :]
        port = int(self.plan.url.rpartition(":")[2])
        self.process = NatsServer(folder / "server", port=port, extra=extra)

    def config(self, role: BusRole) -> BusConfig:
        return self.plan.bus(BusConfig(start_wait_ms=500), role)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("nats"))
    with made.process:
        yield made


def echo(delivery: Delivery) -> None:
    delivery.respond(b"echo " + delivery.data)


@pytest.mark.parametrize(
    ("role", "subject"),
    [
        ("gateway", subjects.CHAT_COMPLETIONS),
        ("gateway", subjects.gateway("g")),
        ("prefill", subjects.worker("w")),
        ("decode", subjects.worker("w")),
        ("pager", subjects.pager("h")),
        ("pager", subjects.pager_report("h")),
        ("pager", subjects.cache_door("stats", "h")),
        ("decode", subjects.worker_report("w")),
    ],
)
async def test_a_service_answers_on_its_own_subject(
    server: Server, role: BusRole, subject: str
) -> None:
    asker: BusRole = "client" if subject == subjects.CHAT_COMPLETIONS else "gateway"
    if subject in (
        subjects.pager_report("h"), subjects.worker_report("w"), subjects.cache_door("stats", "h"),
    ):  # fmt: skip
        asker = "operator"
    async with (
        Bus.connect(server.config(role), role=role, name="service") as service,
        Bus.connect(server.config(asker), role=asker, name="asker") as bus,
    ):
        if asker == "client":
            return await check_client(server, service, subject)
        await service.subscribe(subject, echo)
        reply = await bus.request(subject, b"hello", timeout_ms=2_000)
        assert reply.data == b"echo hello"


async def check_client(server: Server, service: Bus, subject: str) -> None:
    """Any NATS client will do, with the inboxes it has by default."""
    import nats

    await service.subscribe(subject, echo, queue=subjects.CLIENT_QUEUE)
    config = server.config("client")
    client = await nats.connect(
        config.url, user=config.user, password=config.password.reveal(), allow_reconnect=False
    )
    try:
        assert (await client.request(subject, b"hello", timeout=2)).data == b"echo hello"
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("role", "subject"),
    [
        ("client", subjects.worker("w")),
        ("client", subjects.pager("h")),
        ("client", subjects.PRESENCE),
        ("client", subjects.gateway("g")),
        ("client", subjects.cache_door("invalidate")),
        ("client", subjects.cache_door("invalidate", "h")),
        ("gateway", subjects.cache_door("invalidate", "h")),
        ("decode", subjects.worker_report("w")),
        ("prefill", subjects.CHAT_COMPLETIONS),
        ("pager", subjects.gateway("g")),
        ("operator", subjects.worker("w")),
        ("operator", subjects.pager("h")),
        ("operator", subjects.PRESENCE),
        ("operator", subjects.gateway("g")),
        ("gateway", subjects.pages("h")),
    ],
)
async def test_a_role_may_not_send_where_it_has_no_business(
    server: Server, role: BusRole, subject: str
) -> None:
    async with Bus.connect(server.config(role), role=role, name="intruder") as bus:
        with pytest.raises(Denied):
            await bus.request(subject, b"", timeout_ms=2_000)


@pytest.mark.parametrize(
    ("role", "subject"),
    [
        ("prefill", f"{subjects.inbox_prefix('gateway', 'g')}.>"),
        ("decode", subjects.gateway("g")),
        ("pager", subjects.worker("w")),
        ("operator", subjects.CHAT_COMPLETIONS),
    ],
)
async def test_a_role_may_not_listen_to_what_is_for_others(
    server: Server, role: BusRole, subject: str
) -> None:
    async with Bus.connect(server.config(role), role=role, name="intruder") as bus:
        with pytest.raises(Denied):
            await bus.subscribe(subject, echo)


async def test_nobody_gets_in_without_a_password(server: Server) -> None:
    config = BusConfig(url=server.plan.url, start_wait_ms=300)
    with pytest.raises(ConfigError, match="refused user and password"):
        async with Bus.connect(config, role="client", name="nobody"):
            pass
