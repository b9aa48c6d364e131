"""Clients and tenants at a real server: answers reach whom they are for, and nobody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.settings import BusConfig
from pagemesh.wire import subjects
from pagemesh.wire.errors import Denied

USERS = {
    "gateway": ("gateway", "gw", subjects.permissions("gateway")),
    "client": ("client", "any", subjects.permissions("client")),
    "alice": ("client", "alice", subjects.tenant_permissions("alice")),
    "bob": ("client", "bob", subjects.tenant_permissions("bob")),
}


def server_users() -> str:
    lines = []
    for user, (_, _, allowed) in USERS.items():
        lines.append(
            f'{{ user: {user}, password: "p", permissions: {{ '
            f"publish: {json.dumps(allowed.publish)}, "
            f"subscribe: {json.dumps(allowed.subscribe)}, "
            "allow_responses: true } }"
        )
    return "authorization { users: [\n" + "\n".join(lines) + "\n] }\n"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    folder: Path = tmp_path_factory.mktemp("guarded")
    with NatsServer(folder, extra=server_users()) as server:
        yield server


def connect(server: NatsServer, user: str) -> AbstractAsyncContextManager[Bus]:
    role, name, _ = USERS[user]
    config = BusConfig(url=server.url.replace("//", f"//{user}:p@"))
    return Bus.connect(config, role=role, name=name)


class Answers:
    """Answers ``times`` times."""

    def __init__(self, times: int = 1) -> None:
        self._times = times

    def __call__(self, delivery: Delivery) -> None:
        for number in range(self._times):
            delivery.respond(b"%d" % number)


@pytest.mark.parametrize("user", ["client", "alice", "bob"])
async def test_the_gateway_may_stream_any_number_of_answers_to_a_client(
    guarded: NatsServer, user: str
) -> None:
    async with connect(guarded, user) as alice, connect(guarded, "gateway") as gateway:
        await gateway.subscribe(subjects.COMPLETIONS, Answers(times=100))
        async with alice.request_many(subjects.COMPLETIONS, b"") as inbox:
            got = [int((await inbox.receive(timeout_ms=3_000)).data) for _ in range(100)]
    assert got == list(range(100))


@pytest.mark.parametrize(
    "subject",
    [
        "_INBOX_client.alice.>",
        "_INBOX_client.alice.7f.1",
        "_INBOX_client.*.>",
        "_INBOX_client.>",
        "_INBOX.>",
        ">",
        subjects.CHAT_COMPLETIONS,
        subjects.gateway("gw"),
        subjects.PRESENCE,
    ],
)
async def test_a_tenant_cannot_listen_to_another(guarded: NatsServer, subject: str) -> None:
    async with connect(guarded, "bob") as bob:
        with pytest.raises(Denied):
            await bob.subscribe(subject, lambda _: None)


@pytest.mark.parametrize(
    "subject",
    [
        "_INBOX_client.alice.7f.1",
        "_INBOX_client.bob.7f.1",
        subjects.worker("w1"),
        subjects.pager("h1"),
        subjects.gateway("gw"),
        subjects.PRESENCE,
    ],
)
async def test_a_tenant_cannot_forge_answers_or_mesh_messages(
    guarded: NatsServer, subject: str
) -> None:
    async with connect(guarded, "bob") as bob:
        with pytest.raises(Denied):
            await bob.request(subject, b"", timeout_ms=3_000)
