"""Traces of requests, as the blocks of their prompts.

Each line is a JSON object with ``hash_ids``: one integer for each block of the prompt, where equal
prefixes have equal ids (the format of Mooncake's published traces). Other fields are ignored. The
block size is up to the trace; a partial last block counts like the others. A file may be gzipped.
"""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pagemesh.cli.words import typed
from pagemesh.wire.errors import ConfigError

PROMPT_BLOCKS_MAX = 1 << 20
LINE_BYTES_MAX = 64 << 20  # room for PROMPT_BLOCKS_MAX ids of 64 bits
BLOCK_COUNT_MAX = 1 << 28
_GZIP_MARK = b"\x1f\x8b"
_UTF16_STARTS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, b"{\0", b"\0{")


class _Line(msgspec.Struct):
    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class Trace:
    """``prompts``: a number for each block, counted from 0, equal if and only if the block and all
    before it are equal. ``scored_from``: index of the first request that is scored."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    scored_from: int

    @property
    def scored_blocks(self) -> int:
        return sum(map(len, self.prompts[self.scored_from :]))

    @property
    def block_count(self) -> int:
        """The number of different blocks."""
        return 1 + max((number for prompt in self.prompts for number in prompt), default=-1)

    def without_warm_up(self) -> Trace:
        """The trace with only the scored requests."""
        return Trace(self.name, self.prompts[self.scored_from :], 0)


def read_trace(path: Path, scored_share: float) -> Trace:
    """The trace in ``path``; the last ``scored_share`` (over 0, at most 1) of its requests are
    scored. Raises ``ConfigError`` that names file and line."""
    prompts: list[tuple[int, ...]] = []
    places: dict[tuple[int, int], int] = {}
    try:
        for number, line in enumerate(_lines(path), 1):
            if len(line) > LINE_BYTES_MAX:
                raise ConfigError(f"trace {path}, line {number} is too long; is it a trace?")
            if line.strip():
                prompts.append(_prompt(line, f"{path}, line {number}", places))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(
            f"trace {path}: broken gzip: {error}; gunzip it or fetch it anew"
        ) from None
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror}; name a file") from None
    if not prompts:
        raise ConfigError(f"trace {path} is empty")
    scored_from = len(prompts) - max(1, round(scored_share * len(prompts)))
    return Trace(typed(path.name), tuple(prompts), scored_from)


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file that may be gzipped, without a byte order mark. One that is too long is
    cut short."""
    with path.open("rb") as file:
        is_packed = file.peek(len(_GZIP_MARK)).startswith(_GZIP_MARK)
        with io.BufferedReader(gzip.GzipFile(fileobj=file)) if is_packed else file as unpacked:
            first = unpacked.readline(LINE_BYTES_MAX + 1)
            if first.startswith(_UTF16_STARTS):
                raise ConfigError(
                    f"trace {path} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 FILE"
                )
            yield first.removeprefix(codecs.BOM_UTF8)
            yield from iter(lambda: unpacked.readline(LINE_BYTES_MAX + 1), b"")


def _prompt(line: bytes, where: str, places: dict[tuple[int, int], int]) -> tuple[int, ...]:
    if not line.lstrip().startswith(b"{"):
        raise ConfigError(
            f"{where} is not a JSON object; a trace needs the hash_ids of each prompt's blocks "
            "(lengths alone, as in Azure's CSV, do not say what could be shared)"
        )
    try:
        ids = msgspec.json.decode(line, type=_Line).hash_ids
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}; correct or remove it") from None
    if not 0 < len(ids) <= PROMPT_BLOCKS_MAX:
        raise ConfigError(f"{where}: {len(ids)} hash_ids; there must be 1 to {PROMPT_BLOCKS_MAX}")
    place, prompt = -1, []
    for block in ids:
        place = places.setdefault((place, block), len(places))
        prompt.append(place)
    if len(places) > BLOCK_COUNT_MAX:
        raise ConfigError(f"{where}: more than {BLOCK_COUNT_MAX} different blocks")
    return tuple(prompt)
