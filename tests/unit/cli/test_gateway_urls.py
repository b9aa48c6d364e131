"""A URL is checked alike by every command, and its password is never shown."""

from __future__ import annotations

import io

import httpx
import pytest

from pagemesh.cli.chat_stream import client
from pagemesh.cli.client_config import ClientConfig
from pagemesh.cli.main import run
from pagemesh.wire.errors import ConfigError

COMMANDS = (
    ("health",),
    ("bench", "--url"),
    ("chat", "--once", "x", "--url"),
    ("cache", "pin", "--text", "x", "--nats", "nats://127.0.0.1:1", "--url"),
)
CLOSED = "http://u:secret@127.0.0.1:1"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("end", [":99999/", ":0/", ":-1/", ":x/"])
def test_a_port_that_no_server_has_is_refused(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...], end: str
) -> None:
    assert run([*command, f"http://u:secret@127.0.0.1{end}"]) == 2
    told = capsys.readouterr().err
    assert "'http://127.0.0.1:" in told and " URL" in told
    assert told.count("\n") == 1 and "secret" not in told


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_url_is_shown_without_its_password(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert run([*command, CLOSED]) in (1, 2)
    told = capsys.readouterr().err
    assert "http://127.0.0.1:1" in told and "secret" not in told


@pytest.mark.parametrize("end", ["/x?y", "/#y"])
def test_a_gateway_has_no_query_and_no_fragment(
    capsys: pytest.CaptureFixture[str], end: str
) -> None:
    assert run(["bench", "--url", CLOSED + end]) == 2
    told = capsys.readouterr().err
    assert "(--url) has a query or a fragment; end it before the ? or #\n" in told
    assert "secret" not in told


def test_a_chat_is_greeted_without_the_password(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"data": [{"id": "tiny"}]})

    http = client(ClientConfig(url=CLOSED), httpx.MockTransport(handler))
    monkeypatch.setattr("pagemesh.cli.chat.client", lambda _config: http)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run(["chat"]) == 0
    assert capsys.readouterr().err.startswith("tiny at http://127.0.0.1:1. Type")


def test_a_scheme_may_be_in_capitals() -> None:
    with client(ClientConfig(url="HTTP://mesh:1/v1")) as http:
        assert str(http.base_url) == "http://mesh:1"
    with pytest.raises(ConfigError, match="--url"):
        client(ClientConfig(url="http://"))
