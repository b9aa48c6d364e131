"""The HTTP door's plumbing: reads bodies within bounds, sends answers, watches for disconnects.

``Guard`` stands before every path: it checks keys, echoes request ids and turns whatever goes wrong
into OpenAI's error form.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemesh.gateway.api.api_errors import ApiError, ClientLeft, cancelled
from pagemesh.gateway.doors.tenants import Tenants, bearer
from pagemesh.runtime.ids import new_request_id
from pagemesh.runtime.logs import get_logger

BODY_READ_S_MAX = 30.0
PIECE_BYTES_MAX = 256 << 10
"""The most of an answer that may wait for a client to read it, for ``connection.WRITE_S_MAX``."""
_LABEL = re.compile(r"[\x21-\x7e]{1,128}")
_OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
_HEADERS = "pagemesh.headers"
_log = get_logger(__name__)


def headers_of(scope: Scope) -> dict[str, str]:
    """Headers by lower-case name; of a repeated header the first counts."""
    found: dict[str, str] | None = scope.get(_HEADERS)
    if found is None:
        found = scope[_HEADERS] = {}
        for name, value in scope["headers"]:
            found.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return found


async def read_body(scope: Scope, receive: Receive, *, bytes_max: int) -> bytes:
    """The whole body. Raises ``ApiError`` 413 above ``bytes_max`` without reading on, 415 when it
    is compressed, 408 when it does not arrive in time; ``ClientLeft`` when the client
    disconnects."""
    headers = headers_of(scope)
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        text = "the body is compressed (content-encoding); send it uncompressed"
        raise ApiError(415, text, code="unsupported_encoding")
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > bytes_max:
        raise _too_large(bytes_max)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_READ_S_MAX):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientLeft
                size += len(message.get("body", b""))
                if size > bytes_max:
                    raise _too_large(bytes_max)
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time", code="timeout") from None


def _too_large(bytes_max: int) -> ApiError:
    return ApiError(413, f"the body exceeds {bytes_max} bytes", code="body_too_large")


async def send_json(
    send: Send, body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    """A whole answer."""
    await start(send, status, {"content-type": "application/json", **(headers or {})}, len(body))
    await write(send, body, more=False)


async def send_error(send: Send, error: ApiError) -> None:
    await send_json(send, error.body(), status=error.status, headers=error.headers)


async def start(
    send: Send, status: int, headers: Mapping[str, str], length: int | None = None
) -> None:
    """Status and headers; no ``length``: a stream."""
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    if length is not None:
        raw.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def write(send: Send, data: bytes, *, more: bool) -> None:
    """Send a part of an answer in pieces, each once the client has read the one before. If that
    takes too long the connection is cut, which ends the wait."""
    for first in range(0, len(data) or 1, PIECE_BYTES_MAX):
        part, end = data[first : first + PIECE_BYTES_MAX], first + PIECE_BYTES_MAX
        is_more = more or end < len(data)
        await send({"type": "http.response.body", "body": part, "more_body": is_more})


async def while_connected(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Do ``work``, cancelled as soon as the client disconnects. The body must have been read."""
    limit = asyncio.timeout(None)
    watching = asyncio.ensure_future(_end_when_gone(receive, limit))
    try:
        async with limit:
            await work()
    except TimeoutError:
        if not limit.expired():
            raise
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _end_when_gone(receive: Receive, limit: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    limit.reschedule(asyncio.get_running_loop().time())


class Guard:
    """ASGI middleware; see the module."""

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = headers_of(scope)
        label = headers.get("x-request-id", "")
        if not _LABEL.fullmatch(label):
            label = new_request_id()
        started = False

        async def labelled(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", label.encode())]
            await send(message)

        scope["app"] = self  # makes the router raise, rather than answer in its own words
        try:
            self._admit(scope, headers)
            await self._app(scope, receive, labelled)
        except ApiError as error:
            if not started:
                await send_error(labelled, error)
        except HTTPException as error:  # the router's: a path that does not take this method
            if not started:
                allowed = (error.headers or {}).get("Allow", "another method")
                shown = ApiError(error.status_code, f"this path takes {allowed}")
                headers_kept = {**shown.headers, **(error.headers or {})}
                body = shown.body()
                await send_json(labelled, body, status=shown.status, headers=headers_kept)
        except ClientLeft:
            return
        except asyncio.CancelledError:  # the process ends
            if not started:
                await send_error(labelled, cancelled("stopped"))
        except Exception as error:
            _log.error("gateway.http_crashed", error=error)
            if not started:
                await send_error(labelled, ApiError(500, "internal error in the gateway"))

    def _admit(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Check the key and note its tenant. Raises ``ApiError`` 401; only the health paths need no
        key."""
        if scope["path"] in _OPEN_PATHS:
            return
        tenant = self._tenants.tenant_of(bearer(headers.get("authorization", "")))
        if tenant is None:
            message = "a valid API key is required: send the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")
        scope["pagemesh.tenant"] = tenant
