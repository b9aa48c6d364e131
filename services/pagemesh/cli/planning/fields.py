"""Counts out of a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from pagemesh.wire.errors import ConfigError

Config = Mapping[str, Any]

COUNT_MAX = 1 << 32


def has_any(config: Config, names: tuple[str, ...]) -> bool:
    return any(config.get(name) is not None for name in names)


def number(config: Config, names: tuple[str, ...], where: str) -> int:
    """The first of the fields ``names`` that ``config`` has. Raises ``ConfigError`` if that is no
    count, or if there is none."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, list):
            raise ConfigError(f"{where}: {name} differs by layer; no page can hold that")
        if not is_count(value):
            raise ConfigError(f"{where}: {name} is {str(value)[:40]!r}, not a count")
        return value
    raise ConfigError(f"{where}: has no {names[0]}; is it a decoder's config.json?")


def is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= COUNT_MAX
