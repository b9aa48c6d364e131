"""Messages to msgpack bytes and back: ``[version, name, body]``.

No pickle, no extension types, no code chosen by the peer: the name is looked up in the
registry and the body validated field by field before anything else sees it.
"""

from __future__ import annotations

from functools import cache
from typing import TypeVar

import msgspec

from pagemesh.wire import messages
from pagemesh.wire.errors import Malformed
from pagemesh.wire.messages import SCHEMA_VERSION, Message, name_of

MESSAGE_BYTES_MAX = 64 << 20
_envelopes = msgspec.msgpack.Decoder(tuple[int, str, msgspec.Raw])
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T", bound=Message)


def encode(message: Message) -> bytes:
    """``message`` as bytes."""
    return _encoder.encode((SCHEMA_VERSION, name_of(type(message)), message))


def decode(data: bytes) -> Message:
    """The message in ``data``. Raises ``Malformed`` with the reason, never anything else."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise Malformed(f"{len(data)} bytes exceed the limit of {MESSAGE_BYTES_MAX}")
    try:
        version, name, body = _envelopes.decode(data)
    except msgspec.ValidationError as error:
        raise Malformed(f"not an envelope of [version, name, body]: {error}"[:500]) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"not msgpack: {type(error).__name__}") from None
    if version != SCHEMA_VERSION:
        raise Malformed(f"schema version {version} is not {SCHEMA_VERSION}")
    kind = messages.type_of(name)
    if kind is None:
        raise Malformed(f"unknown message {name[:60]!r}")
    try:
        return _decoder(kind).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"{name}: {error}"[:500]) from None


@cache
def _decoder(kind: type[Message]) -> msgspec.msgpack.Decoder[Message]:
    """One for each registered type: making one costs more than using it."""
    return msgspec.msgpack.Decoder(kind)


def decode_as(data: bytes, *kinds: type[T]) -> T:
    """Like ``decode``; ``Malformed`` unless the message is one of ``kinds``.
    A ``Refused`` is raised as the fault it names."""
    message = decode(data)
    if isinstance(message, kinds):
        return message
    if isinstance(message, messages.Refused):
        raise message.error()
    wanted = " or ".join(name_of(kind) for kind in kinds)
    raise Malformed(f"expected {wanted}, got {name_of(type(message))}")
