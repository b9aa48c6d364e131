"""``pagemesh chat`` shows an answer as it comes, what was cached, and why it failed."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagemesh.cli.chat_stream import Answer, ChatError, ask, client, events, served_model
from pagemesh.cli.client_config import ClientConfig
from pagemesh.cli.main import run
from pagemesh.cli.words import typed
from pagemesh.runtime.config import Secret
from pagemesh.wire.errors import ConfigError

Handler = Callable[[httpx.Request], httpx.Response]


def delta(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 40,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 32},
    },
}


def stream(*found: dict[str, Any], done: bool = True) -> httpx.Response:
    lines = [f"data: {json.dumps(event)}\n\n" for event in found]
    return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n" if done else ""]))


def ignore(_piece: str) -> None:
    """For tests that look at something else."""


def mesh(handler: Handler) -> httpx.Client:
    return client(ClientConfig(api_key=Secret("key")), httpx.MockTransport(handler))


def test_pieces_come_in_order_with_usage_and_the_cached_tokens() -> None:
    pieces: list[str] = []
    with mesh(lambda _: stream(delta("Hel"), delta("lo", "stop"), USAGE)) as http:
        answer = ask(http, {"model": "m", "messages": []}, pieces.append)
    assert pieces == ["Hel", "lo"] and answer.text == "Hello"
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (40, 32, 2)
    assert answer.facts.startswith("32 of 40 prompt tokens cached | first token ")


def test_the_request_asks_for_usage_and_carries_the_key() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return stream(USAGE)

    with mesh(handler) as http:
        ask(http, {"model": "m", "messages": [{"role": "user", "content": "x"}]}, ignore)
    body = json.loads(seen[0].content)
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    assert seen[0].headers["authorization"] == "Bearer key"


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (stream(delta("Hel"), done=False), "ended before"),
        (stream(delta("Hel"), {"error": {"message": "worker lost"}}), "worker lost"),
        (httpx.Response(400, json={"error": {"message": "too long"}}), "too long"),
        (httpx.Response(503, text="busy"), "status 503"),
        (httpx.Response(200, text="data: {nonsense\n\n"), "no JSON"),
    ],
)
def test_a_failed_answer_is_an_error_and_never_a_short_one(
    response: httpx.Response, message: str
) -> None:
    with mesh(lambda _: response) as http, pytest.raises(ChatError, match=message):
        ask(http, {}, ignore)


TOO_LONG = {"message": "the prompt has 3620", "code": "context_length_exceeded"}


def test_an_answer_that_may_be_longer_than_what_is_left_gets_what_is_left() -> None:
    asked: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        if "max_tokens" in asked[-1]:
            return httpx.Response(400, json={"error": TOO_LONG})
        return stream(delta("fox", "length"), USAGE)

    with mesh(handler) as http:
        answer = ask(http, {"model": "m", "messages": [], "max_tokens": 512}, ignore)
    assert (answer.text, answer.finish) == ("fox", "length")
    assert [body.pop("max_tokens", None) for body in asked] == [512, None]
    assert asked[0] == asked[1]


def test_a_quota_that_is_used_up_for_now_is_no_matter_of_the_conversation() -> None:
    asked: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(429, json={"error": TOO_LONG | {"code": "quota_exceeded"}})

    with mesh(handler) as http, pytest.raises(ChatError) as refused:
        ask(http, {"model": "m", "messages": [], "max_tokens": 10}, ignore)
    assert type(refused.value) is ChatError and len(asked) == 1


@pytest.mark.parametrize("code", ["context_length_exceeded", "quota_exceeded"])
@pytest.mark.parametrize("in_stream", [False, True])
def test_a_conversation_that_leaves_no_room_is_told_with_the_way_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: str, in_stream: bool
) -> None:
    error = {"error": TOO_LONG | {"code": code}}
    asked: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        asked.append(request)
        return stream(error) if in_stream else httpx.Response(400, json=error)

    monkeypatch.setattr("pagemesh.cli.chat.client", lambda _config: mesh(handler))
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert run(["chat"]) == 0
    shown = capsys.readouterr().err
    assert "error: the prompt has 3620; /reset starts a new conversation\n" in shown
    assert len(asked) == (1 if in_stream else 2)


def test_comments_and_blank_lines_between_events_are_skipped() -> None:
    lines = iter([": keep-alive", "", 'data: {"choices": []}', "data: [DONE]"])
    assert list(events(lines)) == [{"choices": []}]


def test_the_served_model_is_asked_for() -> None:
    with mesh(lambda _: httpx.Response(200, json={"data": [{"id": "pagemesh-demo"}]})) as http:
        assert served_model(http) == "pagemesh-demo"


def test_a_mesh_without_a_model_is_not_ready_yet() -> None:
    with mesh(lambda _: httpx.Response(200, json={"data": []})) as http:
        with pytest.raises(ChatError, match="no model yet"):
            served_model(http)


def test_nobody_at_the_url_is_said_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "--url", "http://127.0.0.1:1", "--once", "hi"]) == 2
    assert "pagemesh up" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("response", "what"),
    [
        (httpx.Response(404), "status 404"),
        (httpx.Response(501, text="<html>"), "status 501"),
        (httpx.Response(200, text="hello"), "no JSON object"),
    ],
)
def test_who_answers_and_is_no_gateway_is_named(response: httpx.Response, what: str) -> None:
    with mesh(lambda _: response) as http, pytest.raises(ChatError) as caught:
        served_model(http)
    url = "http://127.0.0.1:8000/v1/models"
    assert str(caught.value) == (
        f"{url} answers {what}, which is no answer of a gateway; name it with --url"
    )


def test_a_gateway_without_tls_that_is_asked_for_it_is_not_said_to_be_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"https://127.0.0.1:{server.getsockname()[1]}"

        def answer_in_plain_text() -> None:
            for _ in range(2):
                taken, _address = server.accept()
                with taken:
                    taken.recv(4_096)
                    taken.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        answering_thread = threading.Thread(target=answer_in_plain_text)
        answering_thread.start()
        pin = ["cache", "pin", "--text", "x", "--nats", "nats://127.0.0.1:1"]
        for command in (["chat", "--once", "hi"], pin):
            assert run([*command, "--url", url]) == 2
            line = capsys.readouterr().err
            assert line.startswith(f"error: TLS with {url} fails (wrong version number); where it")
            assert "--url http://HOST:PORT" in line
        answering_thread.join()


def test_a_mesh_is_asked_without_the_proxies_of_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "foo://proxy")
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    assert run(["chat", "--url", "http://127.0.0.1:1", "--once", "hi"]) == 2
    assert "no mesh at http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "why"), [(None, "no such file or directory"), ("no PEM", "no_certificate")]
)
def test_certificates_that_cannot_be_read_are_named_where_there_is_tls(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    content: str | None, why: str,
) -> None:  # fmt: skip
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    assert run(["chat", "--url", "https://127.0.0.1:1", "--once", "hi"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: SSL_CERT_FILE='{file}' cannot be used: {why}")
    assert run(["chat", "--url", "http://127.0.0.1:1", "--once", "hi"]) == 2
    assert "no mesh at http://127.0.0.1:1" in capsys.readouterr().err


def test_what_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="--url"):
        client(ClientConfig(url="127.0.0.1:8000"))


def test_a_url_as_sdks_want_it_is_taken_too() -> None:
    seen: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(str(request.url))
        return httpx.Response(200, json={"data": [{"id": "tiny"}]})

    for url in ("http://mesh:1", "http://mesh:1/", "http://mesh:1/v1", "http://mesh:1/v1/"):
        with client(ClientConfig(url=url), httpx.MockTransport(handler)) as http:
            served_model(http)
    assert seen == ["http://mesh:1/v1/models"] * 4


def test_tokens_that_came_together_have_no_rate() -> None:
    assert Answer("x", "stop", 1, 0, 7, 0.0700, 0.0701).facts.endswith("7 tokens in 0.07 s")


@pytest.mark.parametrize(
    ("typed", "answers", "told", "count"),
    [
        ("/help\n/rest\n/etc/hosts is what?\n", 1, "/reset forgets the conversation, /quit", 3),
        ("one\n/reset\ntwo\n", 2, "\na new conversation\n", 1),
    ],
    ids=["slips are told and not asked of the model", "a new conversation is told"],
)
def test_commands_are_answered_by_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    typed: str, answers: int, told: str, count: int,
) -> None:  # fmt: skip
    answering(monkeypatch, "fox")
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert run(["chat"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "fox\n" * answers and shown.err.count(told) == count


def test_an_answer_that_hit_its_limit_says_so() -> None:
    answer = Answer("x", "length", 1, 0, 5, 0.1, 0.5)
    assert answer.facts.endswith("5 tokens in 0.50 s (10/s) | stopped by length")


def test_names_and_errors_are_shown_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "m[/x]:smile:"}]})
        return httpx.Response(400, json={"error": {"message": "[b]no:smile:"}})

    monkeypatch.setattr("pagemesh.cli.chat.client", lambda _config: mesh(handler))
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert run(["chat"]) == 0
    shown = capsys.readouterr().err
    assert shown.startswith("m[/x]:smile: at http://") and "error: [b]no:smile:\n" in shown


def test_what_is_said_of_a_conversation_is_one_line_however_narrow_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "this model's maximum context length is 4096 tokens; the prompt has 3620"

    def handler(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        if b"too long" in request.content:
            return httpx.Response(400, json={"error": {"message": told}})
        return stream(delta("fox", "stop"), USAGE)

    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("pagemesh.cli.chat._MESSAGE_COUNT_MAX", 1)
    monkeypatch.setattr("pagemesh.cli.chat.client", lambda _config: mesh(handler))
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\ntoo long\n"))
    assert run(["chat"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert "the conversation is very long; /reset starts a new one" in lines
    assert f"error: {told}" in lines


class Terminal(io.StringIO):
    """Text streams as they look on a terminal."""

    def isatty(self) -> bool:
        return True


def answering(monkeypatch: pytest.MonkeyPatch, *pieces: str) -> None:
    """Have ``pagemesh chat`` talk to a mesh that always says ``pieces``."""

    def handler(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        return stream(*map(delta, pieces), USAGE)

    monkeypatch.setattr("pagemesh.cli.chat.client", lambda _config: mesh(handler))


def test_input_that_is_no_terminal_gets_the_answers_alone_to_the_letter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, "the quick ", "brown  ", "fox")
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert run(["chat"]) == 0
    assert capsys.readouterr().out == "the quick brown  fox\n" * 2


def test_bytes_that_are_no_text_are_asked_with_a_mark_in_their_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, "fox")
    monkeypatch.setattr("sys.stdin", io.StringIO("caf\udce9 \udcc3\udca9\n"))
    assert run(["chat", "--system", "\udcff"]) == 0
    assert run(["chat", "--once", "\udcff"]) == 0
    assert capsys.readouterr().out == "fox\nfox\n"
    assert typed("caf\udce9 \udcc3\udca9") == "caf\ufffd \u00e9"


def test_without_an_input_a_conversation_is_refused_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, "fox")
    monkeypatch.setattr("sys.stdin", None)
    assert run(["chat"]) == 2
    assert "no standard input" in capsys.readouterr().err


def test_a_terminal_gets_a_prompt_and_lines_that_break_at_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answering(monkeypatch, "the quick ", "bro", "wn fox")
    monkeypatch.setenv("COLUMNS", "10")
    screen = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal("one\n"))
    monkeypatch.setattr("sys.stdout", screen)
    assert run(["chat"]) == 0
    assert screen.getvalue() == "> the quick\nbrown fox\n> "
