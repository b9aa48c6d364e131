"""JSON schemas as clients' libraries make them, without what llguidance stops at. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pagemesh.wire.errors import first_line

_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Hold schemas by names that are not keywords."""
_DATA = frozenset({"const", "enum", "default", "examples"})
_PARTS = re.compile(r"(?s:\\.)|\[|\]|\(\?<?[=!]")


def in_one_line(why: str) -> str:
    """llguidance's fault of a schema. Of a pattern it shows that first, and the reason last."""
    said = first_line(ValueError(why))
    reasons = [line for line in why.splitlines() if line.startswith("error: ")]
    return f"{said} ({reasons[0].removeprefix('error: ')})" if reasons else said


def followed_schema(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """``schema`` without what says nothing and llguidance does not know; and unless ``strict``,
    without the patterns that no automaton follows, as pydantic writes them for decimals and zod for
    addresses. What else is unknown, llguidance then ignores itself."""
    try:
        return _followed(schema, strict=strict)
    except RecursionError:  # llguidance says whether that is too deep
        return dict(schema)


def _followed(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "propertyNames" and value == {"type": "string"}:
            continue
        if key == "pattern" and not strict and isinstance(value, str) and _looks_around(value):
            continue
        if key in _NAMED and isinstance(value, dict):
            made[key] = {name: _inner(one, strict=strict) for name, one in value.items()}
        else:
            made[key] = value if key in _DATA else _inner(value, strict=strict)
    return made


def _inner(value: Any, *, strict: bool) -> Any:
    if isinstance(value, list):
        return [_inner(one, strict=strict) for one in value]
    return _followed(value, strict=strict) if isinstance(value, dict) else value


def _looks_around(pattern: str) -> bool:
    """Whether it looks ahead or behind, or back at a group."""
    in_class = False
    for part in _PARTS.findall(pattern):
        if in_class:
            in_class = part != "]"
        elif part == "[":
            in_class = True
        elif part[0] == "(" or part[1:] in tuple("123456789k"):
            return True
    return False
