"""Sizes in bytes as people write and read them: ``512MiB``, ``8GB``, ``13.48 GB``.

Decimal units (kB, MB, GB, TB) are powers of 1,000, binary ones (KiB, MiB, GiB, TiB) of 1,024.
A bare ``8G`` could mean either, so it is refused.
"""

from __future__ import annotations

import re
from decimal import Decimal

_BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FACTORS = {"": 1, "b": 1} | {unit.lower(): n for unit, n in (_BINARY | _DECIMAL).items()}
_SIZE = re.compile(r"([0-9]{1,24}(?:\.[0-9]{1,24})?) ?([a-zA-Z]*)")


def parse_size(text: str) -> int:
    """Bytes; a fraction of a byte is dropped. Raises ``ValueError`` for text that is no size."""
    found = _SIZE.fullmatch(text.strip())
    factor = _FACTORS.get(found[2].lower()) if found else None
    if found is None or factor is None:
        raise ValueError(f"{text[:80]!r} is not a size such as 512MiB or 8GB")
    return int(Decimal(found[1]) * factor)


def exact_size(count_bytes: int) -> str:
    """The shortest text that ``parse_size`` reads as exactly ``count_bytes``."""
    for unit, factor in reversed(_BINARY.items()):
        if count_bytes and count_bytes % factor == 0:
            return f"{count_bytes // factor}{unit}"
    return str(count_bytes)


def shown_binary(count_bytes: float) -> str:
    """For people, in binary units: ``320 KiB``, ``2.5 MiB``."""
    return _shown(count_bytes, _BINARY)


def shown_decimal(count_bytes: float) -> str:
    """For people, in decimal units, as memory is sold: ``85.9 GB``."""
    return _shown(count_bytes, _DECIMAL)


def shown_both(count_bytes: float) -> str:
    """``85.9 GB (80 GiB)``: one is easily mistaken for the other, and here they differ by 7%."""
    return f"{shown_decimal(count_bytes)} ({shown_binary(count_bytes)})"


def _shown(count_bytes: float, units: dict[str, int]) -> str:
    for unit, factor in reversed(units.items()):
        if count_bytes >= factor:
            return f"{_digits(count_bytes / factor)} {unit}"
    return f"{_digits(count_bytes)} B"


def _digits(value: float) -> str:
    """Up to four digits, without trailing zeros after the point."""
    text = f"{value:,.0f}" if value >= 1_000 else f"{value:.{2 if value < 100 else 1}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
