"""Streamed answers, parsed after the fact and timed by the arrival of their bytes.

A ``Connection`` does as little as possible, since the client's cost counts as the mesh's.
(``pagemesh.cli.benching`` sends many requests at once, and to any server.)
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx

from pagemesh.cli.benching.timed_stream import Pieces

_LAST_CHUNK = b"0\r\n\r\n"


class Connection:
    """A connection to the mesh at ``url``, which serves ``model``."""

    def __init__(self, url: str) -> None:
        self.model: str = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._socket = socket.create_connection((self._host, int(port)), timeout=60.0)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self._socket.close()

    def ask(self, path: str, body: dict[str, Any]) -> Pieces:
        """Send ``body`` for a greedy, streamed answer of full length with token ids; returns the
        received pieces, each with the seconds since it was sent. Raises ``RuntimeError`` with any
        other answer."""
        data = json.dumps(body | {
            "model": self.model, "temperature": 0, "stream": True, "ignore_eos": True,
            "return_token_ids": True,
        }).encode()  # fmt: skip
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        pieces: list[tuple[float, bytes]] = []
        started_s = time.perf_counter()
        self._socket.sendall(head.encode() + data)
        while not pieces or not pieces[-1][1].endswith(_LAST_CHUNK):
            piece = self._socket.recv(1 << 18)
            pieces.append((time.perf_counter() - started_s, piece))
            if not piece or not pieces[0][1].startswith(b"HTTP/1.1 200"):
                raise RuntimeError(piece.decode() or "the connection was closed")
        return pieces
