"""Random ids of processes, requests and tickets, and names of hosts and services."""

from __future__ import annotations

import ipaddress
import platform
import re
import secrets

from pagemesh.wire.errors import ConfigError
from pagemesh.wire.messages import SHORT_TEXT_MAX

NAME_CHARACTERS_MAX = 64
_NOT_A_NAME = re.compile(r"[^A-Za-z0-9_-]+")
_NOT_UTF_8 = re.compile("[\ud800-\udfff]")
"""Surrogates: what Python makes of bytes that are not UTF-8 in variables, flags and file names."""


def new_incarnation() -> int:
    """One life of a process: a random non-zero u64, so that two lives never share it."""
    return secrets.randbits(64) or 1


def new_request_id() -> str:
    """32 lower-case hexadecimal digits (``wire.messages.RequestId``)."""
    return secrets.token_hex(16)


new_ticket_id = new_request_id
"""Tickets must not be guessable; 128 random bits are not."""


def to_name(text: str, *, fallback: str) -> str:
    """``text`` as one NATS subject token (``wire.messages.Name``): other characters become dashes;
    ``fallback`` when nothing is left."""
    name = _NOT_A_NAME.sub("-", text).strip("-")[:NAME_CHARACTERS_MAX]
    return name or fallback


def check_name(variable: str, text: str) -> None:
    """Raises ``ConfigError`` if ``text``, the setting of ``variable`` (without its prefix), cannot
    be part of subjects and file names."""
    if _is_address(text):
        raise ConfigError(
            f"{_named(variable, text)} is an address, where a name is wanted; one to serve at is "
            "--http HOST:PORT of `up`, --http-host and --http-port of `serve gateway`"
        )
    if not 0 < len(text) <= NAME_CHARACTERS_MAX or _NOT_A_NAME.search(text):
        raise ConfigError(
            f"{_named(variable, text)} is not a name of 1 to {NAME_CHARACTERS_MAX} letters, "
            "digits, - and _; a name with dots can be written with dashes"
        )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return False
    return True


def check_carried(variable: str, text: str, *, characters_max: int = SHORT_TEXT_MAX) -> None:
    """Raises ``ConfigError`` if messages cannot carry ``text``, the setting of ``variable``: it is
    too long or not UTF-8."""
    if len(text) > characters_max or _NOT_UTF_8.search(text):
        raise ConfigError(
            f"{_named(variable, text)} cannot be told to other services, which take up to "
            f"{characters_max:,} characters of UTF-8; give another"
        )


def _named(variable: str, text: str) -> str:
    flag = variable.lower().replace("_", "-")
    return f"PAGEMESH_{variable}={text[:80]!r} (--{flag})"


def host_name() -> str:
    """This host as a name."""
    return to_name(platform.node(), fallback="localhost")


def new_service_name(role: str) -> str:
    """A name for a service that was given none: its role and a random suffix."""
    return f"{role}-{secrets.token_hex(4)}"
