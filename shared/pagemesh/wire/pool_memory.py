"""How the memory of a device's pool changes hands, as a file descriptor, and who moves its pages.

Each worker with a pool on a device listens at a socket beside its lock; the pager of the host
asks there. A descriptor travels beside the message (``runtime.descriptors``):

    pager -> worker      with it   reply            with it
    make                           Ok               the memory, made and zeroed
    take                 memory    Ok
    give                           Ok               the memory, if the worker has it
    keep_only                      Ok               when it has the memory of no other pool
    MovePages            staging   Ok               when the pages are where they should be

Any of them may be answered ``Refused``. Whoever holds the descriptor or has the memory mapped holds
it, so it goes with the last process that does. Before it has a pool made the pager says
``keep_only`` to all workers that it knows, since the pool before is over and there may be no room
for both; a step that goes on over it ends first. A worker answers one after the other, and is not
at work on one any more when it answers, ``Refused`` included: an answer to any says so of all
before it.

Before it closes its socket a worker says ``Leave`` to the pager, over the bus.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from pagemesh.wire.messages import U64, Message, ShortText, registered

Action = Literal["make", "take", "give", "keep_only"]
Direction = Literal["out", "in"]
SIZE_BYTES_MAX = 1 << 44
MOVED_PAGES_MAX = 256
"""In one message: their extents fit into a packet, however they lie."""


@registered("pool.hand_memory")
class HandMemory(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the pool ``pool_incarnation``, whose pages take ``size_bytes``."""

    action: Action
    pool_incarnation: U64
    size_bytes: Annotated[int, Meta(ge=1, le=SIZE_BYTES_MAX)]


@registered("pool.leave")
class Leave(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The worker is about to end, and moves pages until this is answered: ``Ok``, always."""

    worker: ShortText
    incarnation: U64


@registered("pool.move_pages")
class MovePages(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copy pages of the pool ``pool_incarnation``, whose pages take ``size_bytes``, into memory of
    the host (``out``) or from there (``in``): the file beside the message, which the pager has
    mapped too. Page after page of ``extents`` (packed) from its start, ``page_bytes`` each."""

    direction: Direction
    pool_incarnation: U64
    size_bytes: Annotated[int, Meta(ge=1, le=SIZE_BYTES_MAX)]
    page_bytes: Annotated[int, Meta(ge=1, le=SIZE_BYTES_MAX)]
    extents: Annotated[bytes, Meta(min_length=8, max_length=8 * MOVED_PAGES_MAX)]
