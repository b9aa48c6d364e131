"""Server-sent events, parsed after the fact and timed by the arrival of their bytes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

Pieces = Sequence[tuple[float, bytes]]
"""Times of arrival and the bytes that arrived, cut anywhere."""


def events_of(pieces: Pieces) -> Iterator[tuple[float, dict[str, Any]]]:
    """The events that are JSON objects, each with the time at which its end arrived."""
    rest = b""
    for at_s, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield at_s, msgspec.json.decode(line[6:])
