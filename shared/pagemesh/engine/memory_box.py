"""A worker's side of a pool on a device: it makes, takes, gives and maps the memory.

    pager --make, take, give--> [ socket, one thread ] --descriptors--> claim --> step thread
          --keep_only---------> [                    ] --on_discard--> unmap_discarded, there too
          --MovePages---------> [                    ] --> PageMover

The pager only keeps a descriptor: it needs no device, and its death costs nothing while one worker
lives. The memory arrives before the answer to ``OpenSession``, so ``claim`` never waits. Memory is
freed when no process has a descriptor or a mapping of it any more, so a discarded pool must leave
neither: a device may have room for only one pool. See ``wire.pool_memory``.
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
"""For one exchange: a pager that stalls after it connected must not block others."""
_PAUSE_S = 0.2
"""After a connection could not be accepted, most likely because of too many open files."""
_KEPT_MAX = 2
"""Descriptors kept: for the pool in use, and for its successor."""
_UNMAP_S_MAX = 1.0
"""How long a step over a discarded pool may take to end: the pager waits a little longer."""
_log = get_logger(__name__)


class MemoryBox:
    """Listens from construction until ``close``. Raises ``OSError`` when it cannot listen."""

    def __init__(
        self, maker: MemoryMaker, path: Path, on_discard: Callable[[], None] = lambda: None
    ) -> None:
        """``on_discard``: called on the box's thread when the mapped pool was discarded; it has to
        make the step thread call ``unmap_discarded``."""
        self._maker = maker
        self._path = path
        self._on_discard = on_discard
        self._changed = threading.Condition()
        """Guards ``_descriptors`` and ``_mapped``; notified when memory was unmapped."""
        self._descriptors: dict[int, int] = {}
        """By pool incarnation, the one taken or made last at the end."""
        self._mapped: tuple[int, MappedMemory] | None = None
        """The mapped pool's incarnation and memory. If it has no descriptor, it was discarded."""
        self._mover = PageMover(maker)
        """Used by the socket's thread."""
        self._closing = threading.Event()
        path.unlink(missing_ok=True)
        self._socket = descriptors.listen(path)
        self._thread = threading.Thread(target=self._serve, name="pagemesh-memory", daemon=True)
        self._thread.start()

    @property
    def place(self) -> str:
        return self._maker.place

    def claim(self, pool_incarnation: int, size_bytes: int) -> torch.Tensor:
        """Map the pages of a pool: uint8 [size_bytes]. On the step thread. Another pool's memory
        that was claimed before is unmapped, and descriptors that arrived before this pool's are
        closed. Raises ``Gone`` when the memory has not arrived, ``RuntimeError`` when it cannot be
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
        """Whether the mapped pool was discarded."""
        with self._changed:
            return self._mapped is not None and self._mapped[0] not in self._descriptors

    def unmap_discarded(self) -> None:
        """Unmap the claimed memory if its pool was discarded; nothing may use it any more. On the
        step thread."""
        with self._changed:
            if self.is_discarded:
                self._unmap()

    def close(self) -> None:
        """Stop listening, unmap, and close all descriptors."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()  # the worker's lock is held for as long as a move may write pages
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
                _log.warning(
                    "worker.memory_box", error=error, next="the socket accepts connections again"
                )
                continue
            with connection:
                connection.settimeout(_EXCHANGE_S_MAX)
                with contextlib.suppress(OSError):  # the pager hung up; it will ask again
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
        """Perform a request; returns a descriptor to send back and then close, if any. When this
        raises, the packet's descriptor is still open."""
        message = codec.decode(packet.data)
        if isinstance(message, MovePages):
            self._move(message, packet)
            return None
        if not isinstance(message, HandMemory):
            raise Malformed("this socket accepts only HandMemory and MovePages messages")
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
            # The mover would keep a pool mapped for good after its successor came.
            if pool != next(reversed(self._descriptors), None):
                raise Gone(
                    f"this worker has no memory of pool {pool:x}, or a newer pool has replaced it"
                )
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
        """Release the memory of all other pools. Raises ``Busy`` while a step still uses one."""
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
                raise Busy("a step is still running on the previous pool")
