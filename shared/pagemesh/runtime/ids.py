"""Ids that are random, and names. Everything random about identity is made here."""

from __future__ import annotations

import platform
import re
import secrets

NAME_CHARACTERS_MAX = 64
_NOT_A_NAME = re.compile(r"[^A-Za-z0-9_-]+")


def new_incarnation() -> int:
    """One life of a process: a random non-zero u64, so that two lives never share it."""
    return secrets.randbits(64) or 1


def new_request_id() -> str:
    """32 lower-case hexadecimal digits (``wire.messages.RequestId``)."""
    return secrets.token_hex(16)


new_ticket_id = new_request_id
"""Tickets must not be guessable; 128 random bits are not."""


def to_name(text: str, *, fallback: str) -> str:
    """``text`` as one NATS subject token (``wire.messages.Name``): what does not belong there
    becomes a dash; ``fallback`` when nothing is left."""
    name = _NOT_A_NAME.sub("-", text).strip("-")[:NAME_CHARACTERS_MAX]
    return name or fallback


def is_name(text: str) -> bool:
    """Whether ``text`` can be one NATS subject token, and part of a file's name."""
    return 0 < len(text) <= NAME_CHARACTERS_MAX and not _NOT_A_NAME.search(text)


def host_name() -> str:
    """This host as a name."""
    return to_name(platform.node(), fallback="localhost")


def new_service_name(role: str) -> str:
    """A name for a service that was given none: its role and a random tail."""
    return f"{role}-{secrets.token_hex(4)}"
