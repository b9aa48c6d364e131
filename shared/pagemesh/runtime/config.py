"""Configuration: frozen dataclasses, parsed once.

A setting is a field made by ``setting``; it knows its environment variable, its limits and
its help text. ``load`` reads it from the environment, with flags of the same names on top,
and refuses a bad value by name. The command line derives its flags from ``options``, so that
``PAGEMESH_HTTP_PORT`` and ``--http-port`` can never mean different things.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pagemesh.runtime.sizes import exact_size, parse_size
from pagemesh.runtime.user_paths import expanded
from pagemesh.wire.errors import ConfigError

ENV_PREFIX = "PAGEMESH_"
_KEY = "pagemesh.setting"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_SECRETS_REFUSED = frozenset(
    {"changeme", "change-me", "secret", "password", "pagemesh", "default", "test", "example"}
)
SECRET_CHARACTERS_MIN = 16

C = TypeVar("C")
T = TypeVar("T")


class Secret:
    """Text that never shows in a log, a repr or an error."""

    __slots__ = ("_text",)

    def __init__(self, text: str = "") -> None:
        self._text = text

    @property
    def is_set(self) -> bool:
        return bool(self._text)

    def reveal(self) -> str:
        return self._text

    def reveal_bytes(self) -> bytes:
        return self._text.encode()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return "Secret(set)" if self._text else "Secret(unset)"


@dataclass(frozen=True, slots=True)
class Option:
    """One setting, as a command line or a page of documentation needs it."""

    field: str
    variable: str
    kind: object
    """The annotated type: ``int``, ``float``, ``bool``, ``str``, ``Path``, ``Secret``, a
    ``Literal`` or ``tuple[str, ...]``."""
    help: str
    default: str
    minimum: float
    maximum: float
    strong: bool
    size: bool

    @property
    def flag(self) -> str:
        return "--" + self.variable.removeprefix(ENV_PREFIX).lower().replace("_", "-")

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()


def setting(
    default: T,
    variable: str,
    help: str,
    *,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    strong: bool = False,
    size: bool = False,
) -> T:
    """A field of a configuration dataclass.

    ``variable`` is the name without prefix; ``strong`` refuses a short or well-known secret;
    a ``size`` is in bytes and may be written with a unit (``512MiB``).
    """
    meta = {_KEY: (ENV_PREFIX + variable, help, minimum, maximum, strong, size)}
    return dataclasses.field(default=default, metadata=meta)


def computed(make: Callable[[], T], variable: str, help: str) -> T:
    """Like ``setting``, with a default that is computed when the configuration is loaded."""
    meta = {_KEY: (ENV_PREFIX + variable, help, -math.inf, math.inf, False, False)}
    return dataclasses.field(default_factory=make, metadata=meta)


def options(kind: type[object]) -> tuple[Option, ...]:
    """Every setting of a configuration dataclass, in order."""
    hints = typing.get_type_hints(kind)
    found = []
    for field in dataclasses.fields(typing.cast(Any, kind)):
        variable, help_text, minimum, maximum, strong, size = field.metadata[_KEY]
        value: Any = field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        found.append(
            Option(
                field=field.name,
                variable=variable,
                kind=hints[field.name],
                help=help_text,
                default=exact_size(value) if size else _shown(value),
                minimum=minimum,
                maximum=maximum,
                strong=strong,
                size=size,
            )
        )
    return tuple(found)


def load(kind: type[C], environ: Mapping[str, str], flags: Mapping[str, str] | None = None) -> C:
    """``kind`` from the environment; ``flags`` (by variable name, as text) win.

    Raises ``ConfigError`` that names the variable or flag, the value and what is allowed.
    """
    values: dict[str, object] = {}
    for option in options(kind):
        if flags and option.variable in flags:
            values[option.field] = _parse(option, flags[option.variable], option.flag)
        elif option.variable in environ:
            values[option.field] = _parse(option, environ[option.variable], option.variable)
    return kind(**values)


def to_environ(config: object) -> dict[str, str]:
    """The variables that make ``load`` give back ``config``; for starting child processes.
    They contain secrets: pass them to a process, never to a log."""
    out = {}
    for option in options(type(config)):
        value = getattr(config, option.field)
        if isinstance(value, Secret):
            if value.is_set:
                out[option.variable] = value.reveal()
        else:
            out[option.variable] = _shown(value)
    return out


def unknown_variables(environ: Mapping[str, str], kinds: Iterable[type[object]]) -> list[str]:
    """``PAGEMESH_*`` variables that no setting of ``kinds`` reads: most likely typing errors."""
    known = {option.variable for kind in kinds for option in options(kind)}
    return sorted(name for name in environ if name.startswith(ENV_PREFIX) and name not in known)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    if isinstance(value, Secret):
        return ""
    return str(value)


def _parse(option: Option, text: str, origin: str) -> object:
    if option.kind is Secret:
        return _parse_secret(option, text, origin)
    value = text.strip()
    if option.size:
        return _parse_size(option, value, origin)
    if option.kind is bool:
        if value.lower() in _TRUE | _FALSE:
            return value.lower() in _TRUE
        raise _bad(origin, text, "true or false")
    if option.kind is int or option.kind is float:
        return _parse_number(option, value, origin)
    if option.kind is Path:
        if not value:
            raise _bad(origin, text, "a path")
        return expanded(value, f"{origin}={text[:80]!r}")
    if option.choices:
        if value in option.choices:
            return value
        raise _bad(origin, text, "one of " + ", ".join(filter(None, option.choices)))
    if get_origin(option.kind) is tuple:
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _parse_number(option: Option, text: str, origin: str) -> int | float:
    kind = int if option.kind is int else float
    word = "a whole number" if kind is int else "a number"
    if math.isfinite(option.minimum) or math.isfinite(option.maximum):
        word += f" from {_bound(option.minimum)} to {_bound(option.maximum)}"
    try:
        value = kind(text)
    except ValueError:
        raise _bad(origin, text, word) from None
    if not option.minimum <= value <= option.maximum or value != value:
        raise _bad(origin, text, word)
    return value


def _parse_size(option: Option, text: str, origin: str) -> int:
    minimum, maximum = int(option.minimum), int(option.maximum)
    word = f"a size from {exact_size(minimum)} to {exact_size(maximum)}, such as 512MiB or 8GB"
    try:
        value = parse_size(text)
    except ValueError:
        raise _bad(origin, text, word) from None
    if not minimum <= value <= maximum:
        raise _bad(origin, text, word)
    return value


def _bound(value: float) -> str:
    """A limit as it can be typed: ``:g`` would round one with many digits."""
    return f"{value:.0f}" if float(value).is_integer() else f"{value:g}"


def _parse_secret(option: Option, text: str, origin: str) -> Secret:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{origin} holds bytes that are no UTF-8; write it as text") from None
    if option.strong:
        what = f"at least {SECRET_CHARACTERS_MIN} characters that nobody can guess"
        repeated = len(set(text)) < 4
        if text.strip().lower() in _SECRETS_REFUSED or len(text) < SECRET_CHARACTERS_MIN:
            raise ConfigError(f"{origin} is empty, short or well known; use {what}")
        if repeated:
            raise ConfigError(f"{origin} repeats itself; use {what}")
    return Secret(text)


def _bad(origin: str, text: str, allowed: str) -> ConfigError:
    return ConfigError(f"{origin}={text[:80]!r} is not {allowed}")
