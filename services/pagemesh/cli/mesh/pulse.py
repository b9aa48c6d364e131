"""Signs of life of a child process: receives them, and reports when they cease.

A service beats on a pipe from its event loop, so it counts as silent if the loop is blocked, but
not during a long model step, which runs on a thread. The NATS server cannot beat; it counts as
silent if it does not greet a new connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from types import TracebackType
from typing import Self

from pagemesh.cli.mesh.watch import WatchCore, WatchLimits
from pagemesh.runtime.clock import Clock
from pagemesh.runtime.supervise import to_next_s

_READ_BYTES = 1 << 12


class Pulse:
    """Use as a context manager around one life of a child.

    ``flag``: the child's flag for the descriptor to beat on; empty if it has none.
    ``greets_at``: host and port at which the child greets new connections, or None.
    Without either, the child is not watched.
    """

    def __init__(
        self,
        clock: Clock,
        limits: WatchLimits,
        *,
        flag: str = "",
        greets_at: tuple[str, int] | None = None,
    ) -> None:
        self._clock = clock
        self._limits = limits
        self._flag = flag
        self._greets_at = greets_at
        self._core = WatchCore(limits, clock.now_ms())
        self._read_fd: int | None = None
        self._write_fd: int | None = None

    def __enter__(self) -> Self:
        if self._flag:
            self._read_fd, self._write_fd = os.pipe()
            os.set_blocking(self._read_fd, False)
            asyncio.get_running_loop().add_reader(self._read_fd, self._on_readable)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.handed_over()
        self._close_reading()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What the child has to inherit."""
        return () if self._write_fd is None else (self._write_fd,)

    @property
    def arguments(self) -> tuple[str, ...]:
        """What to add to the child's command line."""
        return () if self._write_fd is None else (self._flag, str(self._write_fd))

    @property
    def patience_ms(self) -> int:
        return self._core.patience_ms

    def handed_over(self) -> None:
        """The child has inherited the writing end of the pipe: close ours."""
        if self._write_fd is not None:
            os.close(self._write_fd)
            self._write_fd = None

    async def stopped(self) -> None:
        """Return once the child has been silent for too long."""
        if not self._flag and self._greets_at is None:
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(to_next_s(self._limits.look_ms))
            if self._greets_at is not None and await self._greeted(*self._greets_at):
                self._core.beat()
            if self._core.look(self._clock.now_ms()):
                return

    async def _greeted(self, host: str, port: int) -> bool:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self._limits.look_ms / 1_000):
                reader, writer = await asyncio.open_connection(host, port)
                return bool(await reader.read(1))
        except (OSError, TimeoutError):
            return False
        finally:
            if writer is not None:
                writer.close()

    def _on_readable(self) -> None:
        assert self._read_fd is not None
        with contextlib.suppress(BlockingIOError):
            if os.read(self._read_fd, _READ_BYTES):
                self._core.beat()
            else:
                self._close_reading()

    def _close_reading(self) -> None:
        if self._read_fd is not None:
            asyncio.get_running_loop().remove_reader(self._read_fd)
            os.close(self._read_fd)
            self._read_fd = None
