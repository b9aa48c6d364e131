"""Hypothesis strategies for wire messages, derived from their declared types."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as mi

from pagemesh.wire.messages import Message, registered_types

MESSAGE_TYPES: list[type[Message]] = list(registered_types().values())
_INT_MAX = 2**64 - 1
_SIZE_MAX = 12


def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Valid messages of a registered type, with all of its fields varied."""
    return cast(st.SearchStrategy[Message], _struct(cast(mi.StructType, mi.type_info(kind))))


def any_message() -> st.SearchStrategy[Message]:
    return st.sampled_from(MESSAGE_TYPES).flatmap(messages)


def _struct(info: mi.StructType) -> st.SearchStrategy[Any]:
    fields = {field.name: _value(field.type) for field in info.fields}
    return st.fixed_dictionaries(fields).map(lambda values: info.cls(**values))


def _value(info: mi.Type) -> st.SearchStrategy[Any]:
    match info:
        case mi.Metadata():
            return _value(info.type)
        case mi.StructType():
            return _struct(info)
        case mi.IntType():
            low = info.ge if info.ge is not None else -(2**63)
            return st.integers(int(low), int(info.le if info.le is not None else _INT_MAX))
        case mi.FloatType():
            return st.floats(
                info.ge if info.ge is not None else info.gt,
                info.le,
                exclude_min=info.gt is not None,
                allow_nan=False,
                allow_infinity=False,
            )
        case mi.BoolType():
            return st.booleans()
        case mi.NoneType():
            return st.none()
        case mi.StrType():
            if info.pattern is not None:
                return st.from_regex(info.pattern)
            return st.text(st.characters(codec="utf-8"), max_size=_SIZE_MAX)
        case mi.BytesType():
            return st.binary(
                min_size=info.min_length or 0, max_size=max(_SIZE_MAX, info.min_length or 0)
            )
        case mi.LiteralType():
            return st.sampled_from(info.values)
        case mi.ListType():
            return st.lists(_value(info.item_type), min_size=info.min_length or 0, max_size=3)
        case mi.DictType():
            return st.dictionaries(_value(info.key_type), _value(info.value_type), max_size=3)
        case mi.UnionType():
            return st.one_of([_value(part) for part in info.types])
    raise TypeError(f"no strategy for {info}; teach tests.support.wire_values")


def builtins(message: Message) -> dict[str, Any]:
    """The body of a message as plain values."""
    return cast(dict[str, Any], msgspec.to_builtins(message, builtin_types=(bytes,)))
