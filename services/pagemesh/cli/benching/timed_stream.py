"""Server-sent events, timed by when their bytes came and read afterwards. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

Pieces = Sequence[tuple[float, bytes]]
"""When bytes came, and what: cut anywhere."""


def events_of(pieces: Pieces) -> Iterator[tuple[float, dict[str, Any]]]:
    """Events that are objects, each when its end came."""
    rest = b""
    for at_s, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield at_s, json.loads(line[6:])
