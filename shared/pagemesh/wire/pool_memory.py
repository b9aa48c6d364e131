"""How the memory of a device's pool changes hands, as a file descriptor.

Each worker with a pool on a device listens at a socket beside its lock; the pager of the host
asks there. A descriptor travels beside the message (``runtime.descriptors``):

    pager -> worker      with it   reply            with it
    make                           Ok               the memory, made and zeroed
    take                 memory    Ok
    give                           Ok               the memory, if the worker has it

Any of them may be answered ``Refused``. Whoever holds the descriptor holds the memory, so it
goes with the last process that does.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from pagemesh.wire.messages import U64, Message, registered

Action = Literal["make", "take", "give"]
SIZE_BYTES_MAX = 1 << 44


@registered("pool.hand_memory")
class HandMemory(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the pool ``pool_incarnation``, whose pages take ``size_bytes``."""

    action: Action
    pool_incarnation: U64
    size_bytes: Annotated[int, Meta(ge=1, le=SIZE_BYTES_MAX)]
