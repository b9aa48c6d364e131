"""Free ports of this machine, and how addresses are written."""

from __future__ import annotations

import contextlib
import errno
import random
import re
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_RANGE_USUAL = (32_768, 60_999)
_CHOICE_COUNT = 16_384
_PORT_MIN, _PORT_MAX = 1_024, 65_535
_TRIES_MAX = 64
_OF_THE_PORT = (errno.EADDRINUSE, errno.EACCES)
_USER = re.compile(r"(?s)(^|,)(\s*(?:\w+://)?)(?:(?!,\s*\w+://).)*@")
"""User and password: what is before the last @ of a URL, since a password may contain any
character. URLs that do not parse match too, since errors show them. The next URL begins with a
comma and a scheme."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port that can be listened on, now and when the listener is restarted: if possible none of
    those for outgoing connections, which may have taken it by then. Raises ``OSError``."""
    choices = _choices(*_outgoing())
    for _ in range(_TRIES_MAX if choices else 0):
        try:
            return usable_port(host, random.choice(choices))
        except OSError as error:
            if error.errno not in _OF_THE_PORT:
                raise  # another port would not help
    return usable_port(host, 0)


def usable_port(host: str, port: int) -> int:
    """``port`` when it can be listened on at ``host``; the system's choice for 0. Raises
    ``OSError``."""
    with contextlib.closing(bound_socket(host, port)) as probe:
        probe.listen(1)
        chosen: int = probe.getsockname()[1]
    return chosen


def bound_socket(host: str, port: int) -> socket.socket:
    """A TCP socket of the address, where connections are refused until it is listened at
    (``socket.create_server`` listens at once). Raises ``OSError``."""
    family, address = address_of(host, port)
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def address_of(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Where to listen for TCP at ``host``. Raises ``OSError``."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError:  # raised for a name that no host can have, such as a..b
        raise socket.gaierror(socket.EAI_NONAME, "name or service not known") from None
    return family, address


def shown_address(host: str, port: int) -> str:
    """``host`` and ``port`` as they stand in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_url(text: str, schemes: tuple[str, ...]) -> bool:
    """Whether ``text`` is a URL of one of ``schemes`` with a host, and with a possible port if it
    names one."""
    try:
        parts = urlsplit(text)
        return parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def shown_urls(urls: str) -> str:
    """Comma-separated URLs without users and passwords, for messages and logs."""
    return _USER.sub(r"\1\2", urls)


def _outgoing() -> tuple[int, int]:
    """The first and the last port of outgoing connections."""
    try:
        low, high = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        return _RANGE_USUAL
    return low, high


def _choices(low: int, high: int) -> range:
    """Ports outside of ``low`` to ``high``: those just below or those above, whichever are more."""
    below = range(max(_PORT_MIN, low - _CHOICE_COUNT), low)
    above = range(high + 1, _PORT_MAX + 1)
    return max(below, above, key=len)
