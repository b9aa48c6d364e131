"""A server for OpenAI's completions that returns as many tokens as requested."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pagemesh.cli.benching.client import Server


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunk(text: str, finish: str | None = None) -> bytes:
    return event(choices=[{"text": text, "finish_reason": finish}])


class Answering:
    """A server that returns ``less`` tokens fewer than requested, after ``pause_s``, or the bytes
    ``says`` instead. ``at_once_max``: the largest number of requests in flight together."""

    def __init__(
        self, *, less: int = 0, status: int = 200, pause_s: float = 0.0, says: bytes = b""
    ) -> None:
        self.bodies: list[dict[str, object]] = []
        self.heads: list[bytes] = []
        self.at_once = self.at_once_max = 0
        self._less = less
        self._status = status
        self._pause_s = pause_s
        self._says = says

    @asynccontextmanager
    async def listening(
        self, *, plain: bool = False, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[Server]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        async with server:
            port = server.sockets[0].getsockname()[1]
            yield Server("other", f"http{'s' * bool(tls)}://127.0.0.1:{port}", "m", plain)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        self.at_once += 1
        self.at_once_max = max(self.at_once, self.at_once_max)
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        await asyncio.sleep(self._pause_s)
        count = body["max_tokens"] - self._less
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        said = [chunk(" so")] * count + [chunk("", "length"), event(choices=[], usage=usage)]
        said = [self._says] if self._says else said
        writer.write(f"HTTP/1.1 {self._status} X\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for data in said:
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()
        self.at_once -= 1
        writer.write(b"0\r\n\r\n")
        writer.close()
        await writer.wait_closed()
