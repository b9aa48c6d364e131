"""How the memory of a device's pool is handed over as a file descriptor, and its pages are moved.

Each worker with a pool on a device listens on a socket beside its lock file; the pager of the host
sends requests there. A descriptor travels beside the message (``runtime.descriptors``):

    pager -> worker      with it   reply            with it
    make                           Ok               the memory, made and zeroed
    take                 memory    Ok
    give                           Ok               the memory, if the worker has it
    keep_only                      Ok               when it has the memory of no other pool
    MovePages            staging   Ok               when the pages are where they should be

Any request may be answered ``Refused``. The memory lives as long as any process has its descriptor
or has it mapped. Before the pager has a pool made, it sends ``keep_only`` to all workers it knows,
because the previous pool is over and there may be no room for both; a step that still runs over
the old pool ends first. A worker handles one request at a time and is done with it when it
answers, even with ``Refused``; so an answer also says that all earlier requests are done.

Before a worker closes its socket, it sends ``Leave`` to the pager over the bus.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from pagemesh.wire.messages import U64, Message, ShortText, registered

Action = Literal["make", "take", "give", "keep_only"]
Direction = Literal["out", "in"]
SIZE_BYTES_MAX = 1 << 44
MOVED_PAGES_MAX = 256
"""In one message: their extents fit into a packet even if no two pages are adjacent."""


@registered("pool.hand_memory")
class HandMemory(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Concerns the memory of pool ``pool_incarnation``, whose pages take ``size_bytes``."""

    action: Action
    pool_incarnation: U64
    size_bytes: Annotated[int, Meta(ge=1, le=SIZE_BYTES_MAX)]


@registered("pool.leave")
class Leave(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The worker is about to end; it moves pages until this is answered, always with ``Ok``."""

    worker: ShortText
    incarnation: U64


@registered("pool.move_pages")
class MovePages(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copy pages of pool ``pool_incarnation``, whose pages take ``size_bytes``, to host memory
    (``out``) or from it (``in``). That memory is the file beside the message, which the pager has
    mapped too; it holds the pages of ``extents`` (packed) in order, ``page_bytes`` each."""

    direction: Direction
    pool_incarnation: U64
    size_bytes: Annotated[int, Meta(ge=1, le=SIZE_BYTES_MAX)]
    page_bytes: Annotated[int, Meta(ge=1, le=SIZE_BYTES_MAX)]
    extents: Annotated[bytes, Meta(min_length=8, max_length=8 * MOVED_PAGES_MAX)]
