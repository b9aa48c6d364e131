"""The memory of a pool on a device, of which the pager keeps one open file descriptor.

The pager runs no kernel and maps none of this memory; it asks the first worker to allocate it and
hands the descriptor to the others, at the socket beside each one's lock (``wire.pool_memory``). The
descriptor keeps the memory while no worker lives; while one lives, a new pager gets the descriptor
back from it. If nobody has it any more, the pages are gone, and so must the pool be. Everybody lets
go of the memory of an old pool before there is a new one: a device may have no room for both.

A device may still write for a process whose lock is free already, until it has exited completely:
``has_exited`` tells.

Pages are moved through the same sockets, on other threads (``device_pages``).
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pagemesh.kernels.native.locks import holder_is_dead
from pagemesh.pager.limits import PoolFacts
from pagemesh.runtime import descriptors
from pagemesh.runtime.descriptors import Packet
from pagemesh.runtime.logs import get_logger
from pagemesh.wire import codec
from pagemesh.wire.errors import Busy, Fault, Internal, NoCapacity
from pagemesh.wire.messages import Ok, Refused
from pagemesh.wire.pool_format import LOCK_SUFFIX, MEMORY_SUFFIX
from pagemesh.wire.pool_memory import Action, HandMemory, MovePages

MAKE_S_MAX = 60.0
"""How long a worker may take to allocate and zero the memory; nobody else is served then."""
HAND_S_MAX = 2.0
"""How long a worker may take for anything else: it only stores or duplicates a descriptor."""
FIND_S_MAX = 15.0
"""How long living workers that do not answer are asked for the memory of an earlier life: without
it everything cached is lost."""
LET_GO_S_MAX = 1.2
"""How long a worker may take to let go of another pool, the rest of a running step included."""
_LOOK_S = 0.1
"""How often a wait for a worker that has no time limit checks whether to go on."""
_RETRY_MS = 500
_log = get_logger(__name__)


class PoolMemory:
    """Outlives the lives of the pager within its process. Calls that ask a worker may wait for it,
    so they are not for the event loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = 0
        self._descriptor: int | None = None
        self._watched: dict[str, int] = {}
        """Process descriptors (pidfd) of workers, by the name of their locks."""
        self._watching = threading.Lock()

    def make(self, facts: PoolFacts, lock_name: str, others: Iterable[str] = ()) -> None:
        """Have the worker allocate the memory of a new pool, and keep it. Before that the worker,
        ``others`` and we let go of any earlier memory. Raises what the worker refuses it with, or
        ``Busy`` if it does not answer, or has no room while somebody has not let go."""
        self.drop()
        names = dict.fromkeys((*others, lock_name))
        # In parallel, or the worker that opens the session would give up before its answer.
        with ThreadPoolExecutor(len(names)) as asking:
            have_let_go = list(asking.map(lambda name: self._lets_go(name, facts), names))
        keeping = [name for name, gone in zip(names, have_let_go, strict=True) if not gone]
        try:
            self._take_in(facts, self._ask(lock_name, facts, "make", MAKE_S_MAX))
        except NoCapacity as fault:
            if not keeping:
                raise
            raise Busy(
                f"{', '.join(keeping)} may have kept the memory of an earlier pool, and there "
                f"is no room for both ({fault.message})",
                retry_after_ms=_RETRY_MS,
            ) from None

    def _lets_go(self, lock_name: str, facts: PoolFacts) -> bool:
        """Have the worker keep no memory but that of ``facts``. False: it may have some."""
        try:
            self._ask(lock_name, facts, "keep_only", LET_GO_S_MAX).close()
        except Fault as fault:
            _log.warning("pager.memory_not_let_go", lock=lock_name, reason=fault.message)
            return False
        return True

    def hand_over(self, facts: PoolFacts, lock_name: str) -> None:
        """Make sure that the worker has the memory. Raises like ``make``, or ``Internal``."""
        if not self._has(facts):
            raise Internal("the pager has lost the memory of its pool")
        self._ask(lock_name, facts, "take", HAND_S_MAX).close()

    def find(self, facts: PoolFacts, lock_names: Iterable[str]) -> bool:
        """Look for the memory of a pool from an earlier life: here, or with one of the workers,
        which gives it back. Returns whether it was found."""
        if self._has(facts):
            return True
        asked, until_s = list(lock_names), time.monotonic() + FIND_S_MAX
        while True:
            silent = []
            for lock_name in asked:
                try:
                    self._take_in(facts, self._ask(lock_name, facts, "give", HAND_S_MAX))
                    return True
                except Busy as fault:
                    silent.append(lock_name)
                    reason = fault.message
                except Fault as fault:
                    reason = fault.message
                _log.info("pager.no_memory_from", lock=lock_name, reason=reason)
            asked = [name for name in silent if not self._is_free(name)]
            if not asked or time.monotonic() > until_s:
                return False
            time.sleep(_LOOK_S)

    def _is_free(self, lock_name: str) -> bool:
        return holder_is_dead(self._folder / f"{lock_name}{LOCK_SUFFIX}")

    def watch(self, lock_name: str, pid: int) -> None:
        """Watch for the exit of the process ``pid`` (0: not visible), which holds the lock."""
        for known in list(self._watched):
            self.has_exited(known)
        with self._watching, contextlib.suppress(OSError):  # gone already
            if pid and lock_name not in self._watched:
                self._watched[lock_name] = os.pidfd_open(pid)

    def has_exited(self, lock_name: str) -> bool:
        """Whether the process behind a lock that is free has exited completely. True for one that
        is not watched: it never had memory. Does not wait."""
        with self._watching:
            watched = self._watched.get(lock_name)
            if watched is None:
                return True
            poll = select.poll()
            poll.register(watched, select.POLLIN)
            if not poll.poll(0):
                return False
            os.close(self._watched.pop(lock_name))
            return True

    def move_out(self, message: MovePages, lock_name: str, staging: int, timeout_s: float) -> None:
        """Have the worker copy pages into ``staging``. Raises what it refuses that with, or
        ``Busy`` if it does not answer; then it may still write there."""
        self._exchange(lock_name, Packet(codec.encode(message), staging), timeout_s).close()

    def move_in(
        self, message: MovePages, lock_name: str, staging: int, is_over: Callable[[], bool]
    ) -> None:
        """Have the worker copy pages from ``staging``, however long that takes. Raises what it
        refuses that with, or ``Busy`` if no answer comes, as when it has ended. By then the worker
        is not copying any more, unless ``is_over`` ended the wait."""
        try:
            with descriptors.connected(self._path(lock_name), HAND_S_MAX) as connection:
                descriptors.send(connection, Packet(codec.encode(message), staging))
                connection.settimeout(_LOOK_S)
                while True:
                    try:
                        packet = descriptors.receive(connection)
                    except TimeoutError:
                        if is_over():
                            raise
                    else:
                        break
        except OSError as error:
            while not (is_over() or self._is_idle(lock_name)):
                time.sleep(_LOOK_S)
            raise _no_answer(self._path(lock_name), error) from None
        _check_answer(packet)
        packet.close()

    def _is_idle(self, lock_name: str) -> bool:
        """Whether the worker has ended, or is done with everything it was asked for before."""
        if self._is_free(lock_name):
            return self.has_exited(lock_name)
        message = HandMemory(action="give", pool_incarnation=self._pool, size_bytes=1)
        try:
            self._exchange(lock_name, Packet(codec.encode(message)), HAND_S_MAX).close()
        except Busy:
            return False
        except Fault:
            pass  # any answer will do: it comes after what was asked before
        return True

    def close(self) -> None:
        """Let go of the memory, which is freed unless a worker holds it."""
        self.drop()
        for watched in self._watched.values():
            os.close(watched)
        self._watched.clear()

    def _has(self, facts: PoolFacts) -> bool:
        return self._descriptor is not None and self._pool == facts.incarnation

    def _take_in(self, facts: PoolFacts, packet: Packet) -> None:
        if packet.descriptor is None:
            raise Internal("the worker answered without sending the memory")
        self.drop()
        self._pool, self._descriptor = facts.incarnation, packet.descriptor

    def drop(self) -> None:
        """Let go of the memory of a pool that is over, if there is one."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def _ask(self, lock_name: str, facts: PoolFacts, action: Action, timeout_s: float) -> Packet:
        message = HandMemory(
            action=action, pool_incarnation=facts.incarnation,
            size_bytes=facts.page_count * facts.page_bytes,
        )  # fmt: skip
        own = self._descriptor if action == "take" else None
        return self._exchange(lock_name, Packet(codec.encode(message), own), timeout_s)

    def _exchange(self, lock_name: str, packet: Packet, timeout_s: float) -> Packet:
        """Send ``packet`` and return the answer, an ``Ok`` and what came with it. Raises what the
        worker refuses it with, or ``Busy`` if it does not answer."""
        path = self._path(lock_name)
        try:
            answer, pid = descriptors.exchange(path, packet, timeout_s)
        except OSError as error:
            raise _no_answer(path, error) from None
        self.watch(lock_name, pid)
        _check_answer(answer)
        return answer

    def _path(self, lock_name: str) -> Path:
        return self._folder / f"{lock_name}{MEMORY_SUFFIX}"


def _no_answer(path: Path, error: OSError) -> Busy:
    reason = error.strerror or str(error) or type(error).__name__
    return Busy(f"the worker does not answer at {path.name} ({reason})", retry_after_ms=_RETRY_MS)


def _check_answer(packet: Packet) -> None:
    """Raises ``Fault``, and closes ``packet``, unless the answer is ``Ok``."""
    try:
        answer = codec.decode(packet.data)
        if not isinstance(answer, Ok):
            raise answer.error() if isinstance(answer, Refused) else Internal("a wrong answer")
    except Fault:
        packet.close()
        raise
