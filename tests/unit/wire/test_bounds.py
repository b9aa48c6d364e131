"""What a field takes, to the last value, and not one beyond."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest

from pagemesh.wire import codec, messages
from pagemesh.wire.errors import Malformed
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.work_messages import Sampling

REQUEST = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("kind", "taken", "refused"),
    [
        (messages.Millis, [0, 86_400_000], [-1, 86_400_001]),
        (messages.Digest, [bytes(32)], [bytes(31), bytes(33)]),
        (messages.RequestId, [REQUEST], [REQUEST.upper(), REQUEST[1:], REQUEST + "0"]),
        (messages.ShortText, ["x" * 1_024], ["x" * 1_025]),
        (messages.Packed, [bytes(16 << 20)], [bytes((16 << 20) + 1)]),
    ],
    ids=["Millis", "Digest", "RequestId", "ShortText", "Packed"],
)
def test_a_type_takes_what_it_says(kind: Any, taken: list[Any], refused: list[Any]) -> None:
    for value in taken:
        assert msgspec.convert(value, kind, strict=True) == value
    for value in refused:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(value, kind, strict=True)


@pytest.mark.parametrize(
    ("kind", "name", "taken", "refused"),
    [
        (SequenceKey, "attempt", 1, 0),
        (Sampling, "top_p", 1e-9, 0.0),
        (Sampling, "stop_tokens", [0] * 64, [0] * 65),
    ],
)
def test_a_field_takes_what_it_says(
    kind: type[msgspec.Struct], name: str, taken: object, refused: object
) -> None:
    whole = {"request": REQUEST, "choice": 0} if kind is SequenceKey else {"max_tokens": 1}
    assert getattr(msgspec.convert({**whole, name: taken}, kind), name) == taken
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.convert({**whole, name: refused}, kind)


@pytest.mark.parametrize("body", [[None] * 131_073, dict.fromkeys(range(131_073))])
def test_longer_lists_and_maps_are_not_even_made(body: object) -> None:
    with pytest.raises(Malformed, match="not msgpack"):
        codec.decode(msgpack.packb([1, "ok", body]))
