"""What stands before every path: whatever goes wrong there is told in OpenAI's form, once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from pagemesh.gateway.api.api_errors import ApiError, ClientLeft
from pagemesh.gateway.doors.asgi import Guard, send_json, start, while_connected
from pagemesh.gateway.doors.tenants import Tenants

App = Callable[[Scope, Receive, Send], Any]


async def through(app: App, *, kind: str = "http") -> list[Message]:
    """What is sent of a request to ``app`` behind its guard."""
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("nobody reads here")

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": kind, "path": "/v1/completions", "headers": []}
    await Guard(app, Tenants("", b"secret"))(scope, receive, send)
    return sent


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (ZeroDivisionError("of secret words"), 500, "server_error", None),
        (ApiError(429, "too many", code="x"), 429, "rate_limit_error", "x"),
        (asyncio.CancelledError(), 503, "overloaded_error", "stopped"),
    ],
)
async def test_what_ends_a_request_is_told_in_one_form(
    error: BaseException, status: int, kind: str, code: str | None
) -> None:
    async def fail(*_: Any) -> None:
        raise error

    head, body = await through(fail)
    assert head["status"] == status
    told = json.loads(body["body"])["error"]
    assert set(told) == {"message", "type", "param", "code"}
    assert (told["type"], told["code"]) == (kind, code)
    assert "secret" not in told["message"]
    headers = dict(head["headers"])
    assert headers[b"content-type"] == b"application/json"
    assert len(headers[b"x-request-id"]) == 32


@pytest.mark.parametrize(
    "error", [ZeroDivisionError(), ApiError(400, "no"), asyncio.CancelledError(), ClientLeft()]
)
async def test_an_answer_that_has_begun_gets_no_second_head(error: BaseException) -> None:
    async def fail(_scope: Scope, _receive: Receive, send: Send) -> None:
        await start(send, 200, {})
        raise error

    (head,) = await through(fail)
    assert head["status"] == 200


async def test_who_has_left_is_told_nothing() -> None:
    async def leave(*_: Any) -> None:
        raise ClientLeft

    assert await through(leave) == []


async def test_what_is_no_request_goes_no_further() -> None:
    async def answer(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send_json(send, b"{}")

    assert len(await through(answer)) == 2
    assert await through(answer, kind="lifespan") == []


class Client:
    """Sends a few messages that mean nothing, and leaves when ``gone`` is set."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self._idle = [{"type": "http.request"}] * 2

    async def receive(self) -> Message:
        if self._idle:
            return self._idle.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def test_work_is_cut_off_as_soon_as_its_client_leaves() -> None:
    client, began, ends = Client(), asyncio.Event(), []

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cut off")

    serving = asyncio.create_task(while_connected(client.receive, work))
    await began.wait()
    assert not serving.done()
    client.gone.set()
    async with asyncio.timeout(5):
        await serving
    assert ends == ["cut off"]


async def test_time_that_runs_out_within_the_work_is_no_client_that_left() -> None:
    async def work() -> None:
        raise TimeoutError("of the work")

    with pytest.raises(TimeoutError, match="of the work"):
        await while_connected(Client().receive, work)
