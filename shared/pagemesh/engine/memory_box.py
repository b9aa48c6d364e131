"""A worker's side of a pool on a device: it makes the memory, takes it, gives it, maps it.

    pager --make, take, give--> [ socket, one thread ] --descriptors--> claim --> step thread
          --keep_only---------> [                    ] --on_discard--> unmap_discarded, there too
          --MovePages---------> [                    ] --> PageMover

The pager keeps a descriptor and no more: it needs no device, and its death costs nothing while
one worker lives. The answer to ``OpenSession`` comes after the memory did, so that ``claim``
never waits. Memory goes with the last descriptor and the last map of it, here and elsewhere, so a
pool that is over must leave neither: a device may have room for one alone. See
``wire.pool_memory``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from pagemesh.engine.device_memory import MappedMemory, MemoryMaker, PageMover
from pagemesh.runtime import descriptors
from pagemesh.runtime.descriptors import Packet
from pagemesh.runtime.logs import get_logger
from pagemesh.wire import codec
from pagemesh.wire.errors import Busy, Fault, Gone, Internal, Malformed, first_line
from pagemesh.wire.messages import Message, Ok, Refused
from pagemesh.wire.pool_memory import HandMemory, MovePages

_EXCHANGE_S_MAX = 5.0
"""A pager that asks and then stands still must not keep others from asking."""
_PAUSE_S = 0.2
"""After what kept it from taking a connection: too many open files, most likely."""
_KEPT_MAX = 2
"""Memories: of the pool in use, and of the one that follows it."""
_UNMAP_S_MAX = 1.0
"""What a step may take to end whose pool was discarded: the pager waits a little longer."""
_log = get_logger(__name__)


class MemoryBox:
    """Listens from the start; a context manager. Raises ``OSError`` when it cannot."""

    def __init__(
        self, maker: MemoryMaker, path: Path, on_discard: Callable[[], None] = lambda: None
    ) -> None:
        """``on_discard``: called on the box's thread when the pool that is mapped was discarded, to
        have ``unmap_discarded`` called on the step thread."""
        self._maker = maker
        self._path = path
        self._on_discard = on_discard
        self._changed = threading.Condition()
        """Held while what follows is read or changed; told when a map is undone."""
        self._descriptors: dict[int, int] = {}
        """By pool incarnation; the one that the pager spoke of last is last."""
        self._mapped: tuple[int, MappedMemory] | None = None
        """Without a descriptor: discarded."""
        self._mover = PageMover(maker)
        """Of the socket's thread."""
        self._closing = threading.Event()
        path.unlink(missing_ok=True)
        self._socket = descriptors.listen(path)
        self._thread = threading.Thread(target=self._serve, name="pagemesh-memory", daemon=True)
        self._thread.start()

    @property
    def place(self) -> str:
        return self._maker.place

    def claim(self, pool_incarnation: int, size_bytes: int) -> torch.Tensor:
        """uint8 [size_bytes], the pages of that pool, mapped; what was claimed before is
        unmapped, unless it is the same, and memory that came before is let go. On the step
        thread. Raises ``Gone`` when the memory has not come, ``RuntimeError`` when it cannot be
        mapped."""
        with self._changed:
            descriptor = self._descriptors.get(pool_incarnation)
            if descriptor is None:
                raise Gone(f"the memory of pool {pool_incarnation:x} has not come")
            if self._mapped is not None and self._mapped[0] != pool_incarnation:
                self._unmap()
            while (oldest := next(iter(self._descriptors))) != pool_incarnation:
                os.close(self._descriptors.pop(oldest))
            if self._mapped is None:
                self._mapped = pool_incarnation, self._maker.map(descriptor, size_bytes)
            return self._mapped[1].bytes[:size_bytes]

    @property
    def is_discarded(self) -> bool:
        """Whether the pool is over that is mapped."""
        with self._changed:
            return self._mapped is not None and self._mapped[0] not in self._descriptors

    def unmap_discarded(self) -> None:
        """Unmap what was claimed if its pool is over: nothing uses it any more. On the step
        thread."""
        with self._changed:
            if self.is_discarded:
                self._unmap()

    def close(self) -> None:
        """Stop to listen, unmap, let go."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()  # whoever may still be writing into a pool keeps the worker's lock
        self._socket.close()
        self._path.unlink(missing_ok=True)
        self._mover.close()
        with self._changed:
            self._unmap()
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def _unmap(self) -> None:
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            mapped[1].close()
            self._changed.notify_all()

    # On the socket's thread

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closing.wait(_PAUSE_S):
                    return
                _log.warning("worker.memory_box", error=error, next="it listens again")
                continue
            with connection:
                connection.settimeout(_EXCHANGE_S_MAX)
                with contextlib.suppress(OSError):  # the pager left; it asks again
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        packet = descriptors.receive(connection)
        given: int | None = None
        answer: Message = Ok()
        try:
            given = self._perform(packet)
        except Fault as fault:
            packet.close()
            answer = Refused.of(fault)
        except Exception as error:
            packet.close()
            _log.error("worker.memory_failed", error=error)
            answer = Refused.of(Internal(first_line(error)))
        try:
            descriptors.send(connection, Packet(codec.encode(answer), given))
        finally:
            if given is not None:
                os.close(given)

    def _perform(self, packet: Packet) -> int | None:
        """A descriptor to send back and close. Raises with the packet's still open."""
        message = codec.decode(packet.data)
        if isinstance(message, MovePages):
            self._move(message, packet)
            return None
        if not isinstance(message, HandMemory):
            raise Malformed("this socket takes HandMemory and MovePages alone")
        pool = message.pool_incarnation
        if (packet.descriptor is not None) != (message.action == "take"):
            raise Malformed(f"{message.action} comes with the wrong number of descriptors")
        if packet.descriptor is not None:
            self._keep(pool, packet.descriptor)
            return None
        if message.action == "keep_only":
            self._keep_only(pool)
            return None
        with self._changed:
            known = self._descriptors.get(pool)
            if known is not None:
                return os.dup(known)
        if message.action == "give":
            raise Gone(f"this worker has no memory of pool {pool:x}")
        self._keep(pool, self._maker.make(message.size_bytes))
        with self._changed:
            return os.dup(self._descriptors[pool])

    def _move(self, message: MovePages, packet: Packet) -> None:
        if packet.descriptor is None:
            raise Malformed("pages are moved to or from memory beside the message")
        pool = message.pool_incarnation
        with self._changed:
            # Of one that another follows the mover would keep a map for good.
            if pool != next(reversed(self._descriptors), None):
                raise Gone(f"this worker has no memory of pool {pool:x}, or one follows it")
            own = os.dup(self._descriptors[pool])
        try:
            self._mover.move(message, own, packet.descriptor)
        finally:
            os.close(own)
        packet.close()

    def _keep(self, pool: int, descriptor: int) -> None:
        self._mover.keep_only(pool)
        with self._changed:
            known = self._descriptors.pop(pool, None)
            if known is not None:
                os.close(descriptor)
            self._descriptors[pool] = descriptor if known is None else known
            while len(self._descriptors) > _KEPT_MAX:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))

    def _keep_only(self, pool: int) -> None:
        """Let go of the memory of any other pool. Raises ``Busy`` when a step goes on over it."""
        self._mover.keep_only(pool)
        with self._changed:
            for other in self._descriptors.keys() - {pool}:
                os.close(self._descriptors.pop(other))
            if not self.is_discarded:
                return
            self._on_discard()
            self._changed.wait_for(
                lambda: self._closing.is_set() or not self.is_discarded, _UNMAP_S_MAX
            )
            if self.is_discarded:
                raise Busy("a step goes on over the pool before")
