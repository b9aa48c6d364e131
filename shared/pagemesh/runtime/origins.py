"""Web origins as browsers write them, which tell one page's site from another's. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pagemesh.wire.errors import ConfigError

ANY_ORIGIN = "*"
ORIGINS_MAX = 256
_SHOWN_MAX = 80
_PORT_MAX = 65_535
_DEFAULT_PORTS = {"http": 80, "https": 443}
_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{1,5}))?"
)


def parse_origins(texts: Sequence[str]) -> tuple[str, ...]:
    """``texts`` as browsers send them in ``Origin``, for comparison letter by letter: in lower
    case, without the default port of the scheme. ``*`` must be alone. Raises ``ConfigError`` that
    shows what is not an origin."""
    if len(texts) > ORIGINS_MAX:
        raise ConfigError(f"PAGEMESH_CORS_ORIGINS lists more than {ORIGINS_MAX} origins")
    if ANY_ORIGIN in texts and len(texts) > 1:
        raise ConfigError(
            f"PAGEMESH_CORS_ORIGINS (--cors-origins): {ANY_ORIGIN} allows every origin; give it "
            "alone, or leave it out"
        )
    return tuple(text if text == ANY_ORIGIN else _origin(text) for text in texts)


def _origin(text: str) -> str:
    found = _ORIGIN.fullmatch(text.lower())
    if found is None or int(found["port"] or 1) not in range(1, _PORT_MAX + 1):
        raise ConfigError(
            f"PAGEMESH_CORS_ORIGINS: {text[:_SHOWN_MAX]!r} (--cors-origins) is no origin: write "
            f"scheme://host[:port] without a path, such as https://chat.example.com, or "
            f"{ANY_ORIGIN} for all"
        )
    scheme, host = found["scheme"], found["host"]
    port = int(found["port"] or 0)
    if not port or port == _DEFAULT_PORTS.get(scheme):
        return f"{scheme}://{host}"
    return f"{scheme}://{host}:{port}"
