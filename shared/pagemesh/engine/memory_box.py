"""A worker's side of a pool on a device: it makes the memory, takes it, gives it, maps it.

    pager --make, take, give--> [ socket, one thread ] --descriptors--> claim --> step thread

The pager keeps a descriptor and no more: it needs no device, and its death costs nothing while
one worker lives. The answer to ``OpenSession`` comes after the memory did, so that ``claim``
never waits. See ``wire.pool_memory``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path
from typing import Protocol

import torch

from pagemesh.runtime import descriptors
from pagemesh.runtime.descriptors import Packet
from pagemesh.runtime.logs import get_logger
from pagemesh.wire import codec
from pagemesh.wire.errors import Fault, Gone, Internal, Malformed, first_line
from pagemesh.wire.messages import Message, Ok, Refused
from pagemesh.wire.pool_memory import HandMemory

_EXCHANGE_S_MAX = 5.0
"""A pager that asks and then stands still must not keep others from asking."""
_PAUSE_S = 0.2
"""After what kept it from taking a connection: too many open files, most likely."""
_KEPT_MAX = 2
"""Memories: of the pool in use, and of the one that follows it."""
_log = get_logger(__name__)


class MappedMemory(Protocol):
    """``bytes``: uint8 tensor, at least as large as asked for; not to be used after ``close``."""

    @property
    def bytes(self) -> torch.Tensor: ...

    def close(self) -> None: ...


class MemoryMaker(Protocol):
    """Memory of one place that processes share by file descriptor. Any thread may call."""

    @property
    def place(self) -> str:
        """Where it is; processes whose places are equal can map each other's memory."""
        ...

    def make(self, size_bytes: int) -> int:
        """The descriptor of new memory, zeroed. Raises ``NoCapacity`` when there is too little."""
        ...

    def map(self, descriptor: int, size_bytes: int) -> MappedMemory:
        """What ``make`` made here or elsewhere; ``descriptor`` stays the caller's. Raises
        ``RuntimeError``."""
        ...


class MemoryBox:
    """Listens from the start; a context manager. Raises ``OSError`` when it cannot."""

    def __init__(self, maker: MemoryMaker, path: Path) -> None:
        self._maker = maker
        self._path = path
        self._lock = threading.Lock()
        self._descriptors: dict[int, int] = {}
        """By pool incarnation, latest last."""
        self._mapped: tuple[int, MappedMemory] | None = None
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
        unmapped, unless it is the same. On the step thread. Raises ``Gone`` when the memory
        has not come, ``RuntimeError`` when it cannot be mapped."""
        if self._mapped is None or self._mapped[0] != pool_incarnation:
            with self._lock:
                descriptor = self._descriptors.get(pool_incarnation)
                if descriptor is None:
                    raise Gone(f"the memory of pool {pool_incarnation:x} has not come")
                own = os.dup(descriptor)
            self._unmap()
            try:
                self._mapped = pool_incarnation, self._maker.map(own, size_bytes)
            finally:
                os.close(own)
        return self._mapped[1].bytes[:size_bytes]

    def close(self) -> None:
        """Stop to listen, unmap, let go."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_EXCHANGE_S_MAX)
        self._socket.close()
        self._path.unlink(missing_ok=True)
        self._unmap()
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def _unmap(self) -> None:
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            mapped[1].close()

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
        """A descriptor to send back and close. Keeps the packet's, unless it raises."""
        message = codec.decode(packet.data)
        if not isinstance(message, HandMemory):
            raise Malformed("this socket takes HandMemory alone")
        pool = message.pool_incarnation
        if (packet.descriptor is not None) != (message.action == "take"):
            raise Malformed(f"{message.action} comes with the wrong number of descriptors")
        if packet.descriptor is not None:
            self._keep(pool, packet.descriptor)
            return None
        with self._lock:
            known = self._descriptors.get(pool)
            if known is not None:
                return os.dup(known)
        if message.action == "give":
            raise Gone(f"this worker has no memory of pool {pool:x}")
        self._keep(pool, self._maker.make(message.size_bytes))
        with self._lock:
            return os.dup(self._descriptors[pool])

    def _keep(self, pool: int, descriptor: int) -> None:
        with self._lock:
            if pool in self._descriptors:
                os.close(descriptor)
                return
            self._descriptors[pool] = descriptor
            while len(self._descriptors) > _KEPT_MAX:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
