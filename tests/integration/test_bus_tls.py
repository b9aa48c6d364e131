"""TLS to a real server: who is trusted, who we are, and nothing said in clear text."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.certificates import Identity

from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.runtime.bus.tls import tls_context
from pagemesh.runtime.config import Secret
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.settings import BusConfig
from pagemesh.wire import subjects
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.subjects import BUS_ROLES

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs openssl for certificates"
)
CONF = Path(__file__).parents[2] / "ops" / "nats" / "nats-server-tls.conf"
PASSWORD = "a password nobody may overhear"


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    folder = tmp_path_factory.mktemp("certificates")
    return {name: Identity(folder, name) for name in ("server", "client", "stranger")}


def tls_block(server: Identity, more: str = "") -> str:
    return f'tls {{ cert_file: "{server.certificate}", key_file: "{server.key}"{more} }}\n'


async def said_by(config: BusConfig) -> str:
    """What a person is told who connects with ``config`` and cannot."""
    with pytest.raises(ConfigError) as caught:
        async with Bus.connect(config, role="client", name="a"):
            pytest.fail("connected")
    return str(caught.value)


async def echo(config: BusConfig) -> bytes:
    """A message to ourselves and back."""

    tasks: list[object] = []

    def respond(delivery: Delivery) -> None:
        tasks.append(asyncio.current_task())
        delivery.respond(delivery.data)

    async with Bus.connect(config, role="client", name="a") as bus:
        await bus.subscribe("t.echo", respond)
        said = (await bus.request("t.echo", b"said", timeout_ms=5_000)).data
    assert tasks == [None], "a task stands between the socket and the callback"
    return said


async def test_a_server_is_believed_when_the_given_authority_vouches_for_it(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    mine, stranger = identities["server"], identities["stranger"]
    with NatsServer(tmp_path, extra=tls_block(mine)) as server:
        encrypted = server.url.replace("nats://", "tls://")
        for url in (encrypted, server.url):
            assert await echo(BusConfig(url=url, ca_file=mine.certificate)) == b"said"
        for url, ca_file in ((encrypted, stranger.certificate), (encrypted, ""), (server.url, "")):
            said = await said_by(BusConfig(url=url, ca_file=ca_file, start_wait_ms=600_000))
            assert url in said and "not trusted (self" in said and "PAGEMESH_NATS_TLS_CA" in said
            assert "start one there" not in said
            assert (f"which {ca_file!r} is not" in said) is bool(ca_file)


def test_a_command_that_is_refused_over_tls_says_so_in_one_line(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    mine = identities["server"]
    users = 'authorization { users: [{ user: "a", password: "another" }] }\n'
    with NatsServer(tmp_path, extra=tls_block(mine) + users) as server:
        flags = ["--nats", server.url, "--nats-tls-ca", mine.certificate, "--nats-user", "a"]
        command = [sys.executable, "-m", "pagemesh.cli", "cache", "stats", *flags]
        secret = {**os.environ, "PAGEMESH_NATS_PASSWORD": PASSWORD}
        done = subprocess.run(
            command, env=secret, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "refused user and password" in line


async def test_a_certificate_for_another_name_is_told_so_and_not_called_untrusted(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    mine = identities["server"]
    with NatsServer(tmp_path, extra=tls_block(mine)) as server:
        url = server.url.replace("127.0.0.1", "localhost")
        said = await said_by(BusConfig(url=url, ca_file=mine.certificate))
    assert "is for another name" in said and "PAGEMESH_NATS (--nats)" in said
    assert "PAGEMESH_NATS_TLS_CA" not in said


async def test_a_server_that_wants_certificates_gets_ours(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    mine, client, stranger = identities["server"], identities["client"], identities["stranger"]
    verify = f', ca_file: "{client.certificate}", verify: true'
    with NatsServer(tmp_path, extra=tls_block(mine, verify)) as server:

        def config(who: Identity | None) -> BusConfig:
            cert_file, key_file = (who.certificate, who.key) if who else ("", "")
            return BusConfig(
                url=server.url, ca_file=mine.certificate, start_wait_ms=300,
                cert_file=cert_file, key_file=key_file,
            )  # fmt: skip

        assert await echo(config(client)) == b"said"
        for who in (stranger, None):
            said = await said_by(config(who))
            assert "no NATS server at" in said
            assert ("set PAGEMESH_NATS_TLS_CERT (--nats-tls-cert)" in said) is (who is None)


async def test_no_password_is_sent_to_a_server_without_tls(
    identities: dict[str, Identity],
) -> None:
    heard: list[bytes] = []

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","max_payload":1048576,"auth_required":true}\r\n')
        heard.append(await reader.read())
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        for url, ca_file in (("nats", identities["server"].certificate), ("tls", "")):
            config = BusConfig(
                url=f"{url}://127.0.0.1:{port}", ca_file=ca_file, start_wait_ms=300,
                user="gateway", password=Secret(PASSWORD),
            )  # fmt: skip
            assert "offers no TLS" in await said_by(config)
    assert len(heard) >= 2 and set(heard) == {b""}


async def test_a_service_connects_to_the_server_of_the_committed_configuration(
    tmp_path: Path, identities: dict[str, Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = identities["server"]
    monkeypatch.setenv("PAGEMESH_NATS_TLS_CERT", mine.certificate)
    monkeypatch.setenv("PAGEMESH_NATS_TLS_KEY", mine.key)
    for role in BUS_ROLES:
        monkeypatch.setenv(f"PAGEMESH_NATS_PASSWORD_{role.upper()}", f"pm-{role}")
    extra = CONF.read_text().partition("http_port: 8222\n")[2]
    with NatsServer(tmp_path, extra=extra) as server:
        config = BusConfig(
            url=server.url, user="pager", password=Secret("pm-pager"), ca_file=mine.certificate
        )
        async with Bus.connect(config, role="pager", name="p") as bus:
            await bus.subscribe(subjects.pager("h"), lambda _: None)
            assert bus.message_bytes_max > 0


def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    mine, other = identities["server"], identities["client"]
    absent, text = str(tmp_path / "none.pem"), tmp_path / "text.pem"
    text.write_text("no certificate")
    locked = str(tmp_path / "locked.pem")
    command = ["openssl", "rsa", "-aes256", "-passout", "pass:x", "-in", mine.key, "-out", locked]
    subprocess.run(command, check=True, capture_output=True)
    for config, named in (
        (BusConfig(cert_file=mine.certificate, key_file=locked), r"locked\.pem.* has a passphrase"),
        (BusConfig(cert_file=mine.certificate), "name that in PAGEMESH_NATS_TLS_KEY"),
        (BusConfig(ca_file=absent), r"PAGEMESH_NATS_TLS_CA=.*none\.pem.*no such file"),
        (BusConfig(ca_file=str(text)), r"PAGEMESH_NATS_TLS_CA=.*text\.pem"),
        (BusConfig(cert_file=mine.certificate, key_file=absent), r"TLS_CERT=.*none\.pem"),
        (BusConfig(cert_file=mine.certificate, key_file=other.key), r"TLS_CERT=.*client-key"),
        (BusConfig(key_file=mine.key), "PAGEMESH_NATS_TLS_CERT is not"),
    ):
        with pytest.raises(ConfigError, match=named):
            tls_context(config)
