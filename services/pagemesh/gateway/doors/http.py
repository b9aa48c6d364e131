"""The HTTP door: OpenAI's paths, health, metrics, and the server that listens."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import msgspec
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from pagemesh.gateway import measures
from pagemesh.gateway.api.api_errors import ApiError
from pagemesh.gateway.api.openai_api import (
    chat_to_tokenize,
    parse_detokenize,
    parse_tokenize,
)
from pagemesh.gateway.api.render import ANSWER_BYTES_MAX
from pagemesh.gateway.api.tool_grammar import tool_format
from pagemesh.gateway.calls.prepare import check_token, limit_of, render
from pagemesh.gateway.doors.address import CONNECTIONS_BACKLOG, listen, take_address
from pagemesh.gateway.doors.asgi import Guard, read_body, send_json, while_connected
from pagemesh.gateway.doors.completions import (
    CHATS,
    COMPLETIONS,
    NOT_KEPT_PATH,
    RESPONSES,
    Completions,
    Form,
    not_kept,
)
from pagemesh.gateway.doors.connection import Connection
from pagemesh.gateway.doors.cors import for_pages
from pagemesh.gateway.doors.finishing import finished
from pagemesh.gateway.doors.front import Front
from pagemesh.gateway.doors.idempotency import IdempotencyStore
from pagemesh.gateway.doors.off_loop import off_loop
from pagemesh.gateway.doors.scarce_files import ScarceFiles
from pagemesh.runtime.metrics import CONTENT_TYPE
from pagemesh.runtime.ports import shown_address
from pagemesh.runtime.settings import GatewayConfig
from pagemesh.runtime.supervise import to_next_s
from pagemesh.runtime.version import VERSION

_DATE_PERIOD_MS = 1_000
_STOP_PERIOD_S = 0.1
PATH_SHOWN_MAX = 100
"""Characters of an unknown path that its error repeats."""


class _Texts:
    """``/tokenize`` or ``/detokenize``, whose bodies and answers may be as long as those of
    completions. ``answer`` makes the answer from a body and the tenant that sent it."""

    def __init__(
        self,
        front: Front,
        answer: Callable[[bytes, str], Awaitable[bytes]],
        *,
        body_bytes_max: int,
    ) -> None:
        self._front = front
        self._answer = answer
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = scope["pagemesh.tenant"]
        with self._front.entered(tenant):
            body = await read_body(scope, receive, bytes_max=self._body_bytes_max)

            async def serve() -> None:
                await send_json(send, await self._answer(body, tenant))

            await while_connected(receive, serve)


class HttpDoor:
    """``app`` is the ASGI application; ``serve`` listens with it."""

    def __init__(self, front: Front, config: GatewayConfig) -> None:
        self._front = front
        self._config = config
        store = IdempotencyStore()
        bytes_max = config.body_bytes_max

        def completions(form: Form) -> ASGIApp:
            return Completions(front, store, form, body_bytes_max=bytes_max)

        def texts(answer: Callable[[bytes, str], Awaitable[bytes]]) -> ASGIApp:
            return _Texts(front, answer, body_bytes_max=bytes_max)

        asked = {
            "/v1/chat/completions": completions(CHATS),
            "/v1/completions": completions(COMPLETIONS),
            "/v1/responses": completions(RESPONSES),
        }
        routes = [
            *(Route(path, app, methods=["POST"]) for path, app in asked.items()),
            Route(NOT_KEPT_PATH, not_kept, methods=["GET", "POST", "DELETE"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/", self._models, methods=["GET"]),
            Route("/v1/models/{model:path}", self._model, methods=["GET"]),
            Route("/health", self._ready, methods=["GET"]),
            Route("/health/live", self._live, methods=["GET"]),
            Route("/health/ready", self._ready, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/version", self._version, methods=["GET"]),
            Route("/tokenizer_info", self._tokenizer_info, methods=["GET"]),
            Route("/tokenize", texts(self._tokenize), methods=["POST"]),
            Route("/detokenize", texts(self._detokenize), methods=["POST"]),
        ]
        router = Router(routes, redirect_slashes=False, default=_nothing_here)

        async def routed(scope: Scope, receive: Receive, send: Send) -> None:
            """Completions, by far the most frequent, skip the router's search."""
            app = asked.get(scope["path"]) if scope["method"] == "POST" else None
            await (app or router)(scope, receive, send)

        self.app = for_pages(Guard(routed, front.tenants), config.page_origins)

    async def _models(self, _request: Request) -> Response:
        return _json(models_json(self._front))

    async def _model(self, request: Request) -> Response:
        self._front.check_model(request.path_params["model"])
        return _json(model_json(self._front))

    async def _live(self, _request: Request) -> Response:
        return _json({"status": "live"})

    async def _ready(self, _request: Request) -> Response:
        why = self._front.gateway.unready_why
        if why:
            return _json({"status": "not ready", "reason": why}, status=503)
        return _json({"status": "ready"})

    async def _metrics(self, _request: Request) -> Response:
        body = measures.render_metrics()
        if self._config.vllm_metrics:
            directory = self._front.gateway.presence.directory
            workers = [*directory.of_role("prefill"), *directory.of_role("decode")]
            pagers = directory.of_role("pager")
            body += measures.vllm_aliases(self._front.model, workers, pagers)
        return Response(body, media_type=CONTENT_TYPE)

    async def _version(self, _request: Request) -> Response:
        return _json({"version": VERSION})

    async def _tokenizer_info(self, _request: Request) -> Response:
        return _json(self._front.tokens.facts)

    async def _tokenize(self, body: bytes, tenant: str) -> bytes:
        told, salt = await off_loop(len(body), lambda: self._tokens_of(body), owner=tenant)
        roots = msgspec.json.encode(self._front.cache_roots(tenant, salt))
        return b'%b,"cache_roots":%b}' % (told, roots)

    def _tokens_of(self, body: bytes) -> tuple[bytes, str]:
        """The beginning of the answer, and the cache salt that was given. Lists of token ids take
        many times what JSON takes, so none is kept while others have their turn."""
        front = self._front
        form = parse_tokenize(body)
        front.check_model(form.model if form.model is not None else front.model)
        adding = form.add_special_tokens
        if form.messages is not None:
            if form.tools:
                tool_format(front.tokens)  # or the template would leave them out
            text = render(chat_to_tokenize(form, form.messages), front.tokens)
            ids = front.tokens.encode(text, add_special_tokens=bool(adding))
        else:
            text = form.prompt or ""
            ids = front.tokens.encode(text, add_special_tokens=adding is not False)
        told = msgspec.json.encode({"count": len(ids), "tokens": ids.tolist()})
        return told.removesuffix(b"}"), form.cache_salt or ""

    async def _detokenize(self, body: bytes, tenant: str) -> bytes:
        def told() -> bytes:
            return msgspec.json.encode(self._text_of(body))

        return await off_loop(len(body), told, owner=tenant)

    def _text_of(self, body: bytes) -> dict[str, object]:
        front = self._front
        form = parse_detokenize(body)
        front.check_model(form.model if form.model is not None else front.model)
        for token in form.tokens:
            check_token("tokens", token, front.tokens.vocab_tokens)
        if front.tokens.byte_count(form.tokens) > ANSWER_BYTES_MAX:  # some stand for hundreds
            text = (
                f"the text of these tokens exceeds {ANSWER_BYTES_MAX} bytes: send fewer tokens "
                "at once"
            )
            raise ApiError(400, text, "tokens", "answer_too_large")
        return {"prompt": front.tokens.decode(form.tokens)}

    @contextlib.asynccontextmanager
    async def serve(self, taken: socket.socket | None = None) -> AsyncIterator[str]:
        """Listen for as long as the context lasts, on the socket ``taken`` or else at the
        configured address; gives the URL. At the end no new connection is accepted, and running
        requests may finish. Raises ``ConfigError`` for a port that is in use."""
        address = self._config.http_host, self._config.http_port
        with contextlib.closing(taken or take_address(*address)) as listener:
            listen(listener)
            host, port = listener.getsockname()[:2]
            config = uvicorn.Config(
                self.app,
                http=Connection,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=75,
                backlog=CONNECTIONS_BACKLOG,
            )
            server = _Server(config)
            running = asyncio.create_task(server.serve(sockets=[listener]), name="http-server")
            async with finished(self._front.gateway, [running]):
                try:
                    await server.listening.wait()
                    yield f"http://{shown_address(host, port)}"
                finally:
                    server.stop()
            await running


class _Server(uvicorn.Server):
    """Sets ``listening`` when it listens. Signals are the service's business, not the server's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Accept no more connections; ``serve`` returns when the open ones have ended."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Wakes once a second, for the ``Date`` of answers; uvicorn's own loop wakes ten times as
        often."""
        files, loop = ScarceFiles(), asyncio.get_running_loop()
        while not self.should_exit:
            await self.on_tick(0)
            files.look(len(self.server_state.connections), loop.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(to_next_s(_DATE_PERIOD_MS)):
                    await self._stopping.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def _wait_tasks_to_complete(self) -> None:
        """uvicorn shuts down the connections that exist when it begins to stop. One that was being
        accepted at that moment appears only now, and would stay for as long as its client does."""
        while self.server_state.connections:
            for connection in tuple(self.server_state.connections):
                connection.shutdown()
            await asyncio.sleep(_STOP_PERIOD_S)
        await super()._wait_tasks_to_complete()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _nothing_here(scope: Scope, _receive: Receive, _send: Send) -> None:
    path: str = scope["path"]
    hint = "OpenAI's paths begin with /v1, e.g. /v1/models"
    if path.startswith("/v1/"):
        hint = "for answers, use /v1/chat/completions, /v1/responses or /v1/completions"
    message = f"no such path: {path[:PATH_SHOWN_MAX]!r}; {hint}"
    raise ApiError(404, message, code="unknown_url")


def _json(value: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def model_json(front: Front) -> dict[str, object]:
    """One line of the model list."""
    found = front.gateway.router.models().get(front.model)
    line: dict[str, object] = {
        "id": front.model,
        "object": "model",
        "created": front.created,
        "owned_by": "pagemesh",
    }
    if found is not None:
        line["max_model_len"], _ = limit_of(found, front.gateway.bus.message_bytes_max)
    if front.defaults.recommended:
        line["sampling_defaults"] = front.defaults.recommended
    return line


def models_json(front: Front) -> dict[str, object]:
    return {"object": "list", "data": [model_json(front)]}
