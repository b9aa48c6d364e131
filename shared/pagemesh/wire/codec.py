"""Messages to msgpack bytes and back: ``[version, name, body]``.

No pickle, no extension types, no code chosen by the peer: the name is looked up in the
registry and the body validated field by field before anything else sees it.
"""

from __future__ import annotations

from typing import TypeVar

import msgpack
import msgspec

from pagemesh.wire import messages
from pagemesh.wire.errors import Malformed
from pagemesh.wire.messages import SCHEMA_VERSION, Message, name_of

MESSAGE_BYTES_MAX = 64 << 20
_DEPTH_ITEMS_MAX = 1 << 17
_OUTLINE_FIELDS_MAX = 64
T = TypeVar("T", bound=Message)


def encode(message: Message) -> bytes:
    """``message`` as bytes."""
    body = msgspec.to_builtins(message, builtin_types=(bytes,))
    packed: bytes = msgpack.packb([SCHEMA_VERSION, name_of(type(message)), body])
    return packed


def decode(data: bytes) -> Message:
    """The message in ``data``. Raises ``Malformed`` with the reason, never anything else."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise Malformed(f"{len(data)} bytes exceed the limit of {MESSAGE_BYTES_MAX}")
    try:
        envelope = msgpack.unpackb(
            data,
            strict_map_key=False,
            max_ext_len=0,
            max_array_len=_DEPTH_ITEMS_MAX,
            max_map_len=_DEPTH_ITEMS_MAX,
        )
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise Malformed(f"not msgpack: {type(error).__name__}") from None
    if not isinstance(envelope, list) or len(envelope) != 3:
        raise Malformed("not an envelope of [version, name, body]")
    version, name, body = envelope
    if type(version) is not int or version != SCHEMA_VERSION:
        shown = version if isinstance(version, int) else type(version).__name__
        raise Malformed(f"schema version {shown} is not {SCHEMA_VERSION}")
    if not isinstance(name, str):
        raise Malformed(f"a message name must be text, not {type(name).__name__}")
    kind = messages.type_of(name)
    if kind is None:
        raise Malformed(f"unknown message {name[:60]!r}")
    try:
        # Without ``builtin_types``, text in place of bytes would be decoded as base64.
        return msgspec.convert(body, kind, strict=True, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise Malformed(f"{name}: {error}"[:500]) from None


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


def outline(data: bytes, *names: str) -> dict[str, str]:
    """Short texts among the fields ``names`` of a message that ``decode`` does not take, as far as
    they can be found: to tell people whose it is, and for nothing else. Never raises."""
    try:
        body = msgpack.unpackb(data, max_ext_len=0, max_map_len=_OUTLINE_FIELDS_MAX)[2]
        found = {name: body[name] for name in names if name in body}
    except Exception:  # these bytes may be anything
        return {}
    return {name: text[:64] for name, text in found.items() if isinstance(text, str)}
