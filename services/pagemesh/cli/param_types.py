"""Click types of arguments that are not settings: sizes, numbers, lists of counts, hex digits."""

from __future__ import annotations

import math
from typing import Any

import click
import msgspec

from pagemesh.runtime.sizes import parse_size
from pagemesh.wire.cache_messages import RootStart

_DIGITS_MAX = 12
_UNITLESS_BYTES_MIN = 1 << 16


class Size(click.ParamType[int]):
    """A size such as ``512MiB`` or ``8GB``. A small one without a unit, such as ``24``, is refused:
    it was meant as anything but bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            size = parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if 0 < size < _UNITLESS_BYTES_MIN and value.strip()[-1].isdigit():
            self.fail(
                f"{value!r} would be bytes; give it a unit, as in {value.strip()}GB", param, ctx
            )
        return size


class Whole(click.IntRange):
    """A whole number in a range. Click would call it an *integer range*, in errors too."""

    name = "whole number"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "N"


class Number(click.FloatRange):
    """A number in a range. Click alone would accept NaN, since no comparison with it is true."""

    name = "number"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "X"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{str(value)[:80]!r} is no number {self._describe_range()}", param, ctx)
        return number


class Counts(click.ParamType[tuple[int, ...]]):
    """Counts separated by commas, each from ``minimum`` to ``maximum``; ``example`` describes them
    in the error."""

    name = "n,n,..."

    def __init__(self, minimum: int, maximum: int, example: str) -> None:
        self._minimum = minimum
        self._maximum = maximum
        self._example = example

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(map(self._is_count, parts)):
            self.fail(
                f"{str(value)[:80]!r} is not {self._example} "
                f"({self._minimum} to {self._maximum})", param, ctx,
            )  # fmt: skip
        return tuple(map(int, parts))

    def _is_count(self, text: str) -> bool:
        if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
            return False
        return self._minimum <= int(text) <= self._maximum


class Digits(click.ParamType[str]):
    """The hexadecimal digits that a root starts with."""

    name = "hex"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return msgspec.convert(str(value).lower(), RootStart)
        except msgspec.ValidationError:
            self.fail(f"{str(value)[:80]!r} is not hexadecimal digits, 64 at most", param, ctx)
