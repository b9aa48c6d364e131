"""One child process of ``pagemesh up``: started, read, watched, restarted, stopped.

WAITING -> RUNNING -> (exit) -> WAITING ... until stopped, refused or given up
              |          ^
              +- silent -+ killed first: its successor must find locks and ports free
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pagemesh.cli.main import ERROR_PREFIX, EXIT_CONFIG
from pagemesh.cli.mesh.pulse import Pulse
from pagemesh.cli.mesh.restarts import GiveUp, RestartCore, RestartLimits
from pagemesh.cli.mesh.run_folder import put_back
from pagemesh.cli.mesh.watch import WatchLimits
from pagemesh.runtime.clock import Clock
from pagemesh.wire.errors import ConfigError, PagemeshError

_LINE_BYTES_MAX = 1 << 16
_TAIL_LINES_MAX = 40
_KILL_WAIT_S = 5.0
OWN_ERROR = re.compile(f"^(?:{ERROR_PREFIX}|pagemesh [A-Za-z0-9_-]+: )")
"""The start of the line in which a child reports an error in its configuration."""
_CRASH = re.compile("(?:runtime: |fatal error: |panic: )")
"""The start of the line in which Go says why it ends the NATS server: with the exit code of a
configuration error, and a stack below."""
_NO_THREAD = re.compile("new OS thread|new thread|resource temporarily unavailable")
"""What Go, Python and the system say about it."""
STARTED = "started"
"""The state of a child that runs and has not announced a state yet."""


class ChildLost(PagemeshError):
    """A child keeps dying; the message names it and quotes its last line."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. Children of a lower ``stage`` are started first and stopped last.

    A hung child is noticed by one of two means: ``pulse_flag`` is the flag that passes it the
    descriptor to beat on; ``greets_at`` is the host and port at which it greets who connects.
    ``files`` (path -> content) are those that it needs to start: missing ones are written again
    before each start.
    """

    name: str
    role: str
    stage: int
    command: tuple[str, ...]
    environ: Mapping[str, str]
    pulse_flag: str = ""
    greets_at: tuple[str, int] | None = None
    files: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """How often a child may die, and how long it may be silent."""

    restarts: RestartLimits
    watch: WatchLimits


def wait_without_threads() -> None:
    """Wait for children by descriptors, as Python does by itself from 3.12 on. A thread for each
    fails, once its child runs, where no more threads may be started."""
    if sys.version_info < (3, 12) and hasattr(os, "pidfd_open"):  # some builds lack it
        with contextlib.suppress(OSError):  # Linux before 5.3
            os.close(os.pidfd_open(os.getpid()))
            asyncio.set_child_watcher(asyncio.PidfdChildWatcher())


Failure = Callable[[PagemeshError], None]
Line = Callable[[str, str], None]
Changed = Callable[[str, str], None]


class Child:
    """Keeps one process running.

    ``on_line`` gets its name and each line it prints, ``on_change`` its name and its new state, and
    ``on_failure`` the error after which it is not restarted any more.
    """

    def __init__(
        self,
        spec: ChildSpec,
        clock: Clock,
        limits: ChildLimits,
        *,
        on_line: Line,
        on_change: Changed,
        on_failure: Failure,
    ) -> None:
        self.spec = spec
        self._clock = clock
        self._restarts = RestartCore(limits.restarts)
        self._watch_limits = limits.watch
        self._on_line = on_line
        self._on_change = on_change
        self._on_failure = on_failure
        self._process: asyncio.subprocess.Process | None = None
        self._tending: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES_MAX)
        self._crash = ""
        """Why Go ended its last life, if it did."""
        self._killed_here = False
        """Whether its last life ended by a SIGKILL of ours."""

    @property
    def pid(self) -> int | None:
        """The running process; None if there is none now."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to stop and still runs."""
        return self._stopping.is_set() and self.pid is not None

    async def tend(self) -> None:
        """Run and restart until ``stop``; ends early after ``on_failure``.

        A configuration error is final if it ends the first life. A later one has a cause outside
        the mesh, such as a full disk, and may go away again, so it is retried without being counted
        as a death.
        """
        self._tending = asyncio.current_task()
        is_first = True
        while not self._stopping.is_set():
            born_ms = self._clock.now_ms()
            code, is_wrong = None, False
            try:
                code = await self._run_once()
                is_wrong = code == EXIT_CONFIG and not self._crash
                why = self._last_error() if is_wrong else self._crash or _exit_text(code)
            except OSError as error:  # pipe or fork failed: out of resources for now
                why = f"could not be started: {(error.strerror or str(error)).lower()}"
                self._tail.append(why)
            if self._stopping.is_set():
                return
            if is_wrong and is_first:
                self._on_failure(ConfigError(f"{self.spec.name}: {why}"))
                return
            is_first = False
            decision = (
                self._restarts.waits()
                if is_wrong
                else self._restarts.exited(born_ms, self._clock.now_ms())
            )
            self._on_change(self.spec.name, f"died ({why})")
            if isinstance(decision, GiveUp):
                told = f"given up after {_deaths_text(decision)}; the mesh stops"
                self._on_change(self.spec.name, told)  # the error follows when all have stopped
                self._on_failure(ChildLost(self._give_up_text(decision, code)))
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), decision.after_ms / 1_000)

    async def stop(self, grace_ms: int, *, words_ms: int = 0) -> None:
        """Ask it to stop, kill it after ``grace_ms``, and give it up if it does not end even then.
        It is asked a second time ``words_ms`` before it would be killed: a service then cuts off
        running requests and tells its clients."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        words_ms = min(words_ms, grace_ms // 2)
        for wait_ms in (grace_ms - words_ms, words_ms) if words_ms else (grace_ms,):
            self._signal(process, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), wait_ms / 1_000)
                return
        self._on_change(self.spec.name, f"did not stop in {grace_ms} ms; killed")
        self._signal(process, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _KILL_WAIT_S)
            return
        # It is stuck in the kernel, on a disk or device that hangs, and ends once that recovers.
        self._on_change(self.spec.name, "killed, and does not end: see the disk or device it uses")
        self._process = None
        if self._tending is not None:
            self._tending.cancel()

    def kill(self) -> None:
        """Kill it at once."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            self._signal(self._process, signal.SIGKILL)

    async def _run_once(self) -> int:
        self._tail.clear()
        self._crash = ""
        self._killed_here = False
        spec = self.spec
        # If this fails, on a full disk for example, the child reports what is missing.
        with contextlib.suppress(OSError, ConfigError):
            put_back(spec.files)
        with Pulse(
            self._clock, self._watch_limits, flag=spec.pulse_flag, greets_at=spec.greets_at
        ) as pulse:
            process = self._process = await asyncio.create_subprocess_exec(
                *spec.command,
                *pulse.arguments,
                env=dict(spec.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                limit=_LINE_BYTES_MAX,
                start_new_session=True,  # Ctrl-C must reach only us: we stop in order
                pass_fds=pulse.descriptors,
            )
            pulse.handed_over()
            self._on_change(spec.name, STARTED)
            if self._stopping.is_set():
                self._signal(process, signal.SIGTERM)
            watching = asyncio.create_task(self._watch(pulse, process), name=f"{spec.name}-watch")
            try:
                assert process.stdout is not None
                await self._read(process.stdout)
                return await process.wait()
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self, pulse: Pulse, process: asyncio.subprocess.Process) -> None:
        """Kill the process if it hangs; ``tend`` restarts it. This also applies while stopping: a
        hung process ignores SIGTERM, and the others should not have to wait for it."""
        await pulse.stopped()
        seconds = pulse.patience_ms / 1_000
        self._on_change(self.spec.name, f"no sign of life for {seconds:g} s; killed")
        self._killed_here = True
        self._signal(process, signal.SIGKILL)

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than the limit: the reader has dropped it
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._tail.append(text)
            if not self._crash and _CRASH.match(text):
                self._crash = text
            self._on_line(self.spec.name, text)

    def _last_error(self) -> str:
        line = self._tail[-1] if self._tail else "stopped without a word"
        return OWN_ERROR.sub("", line)

    def _give_up_text(self, decision: GiveUp, code: int | None) -> str:
        last = self._crash or (self._tail[-1] if self._tail else "nothing")
        cause = ""
        if code == -signal.SIGKILL and not self._killed_here:
            cause = ": killed (SIGKILL), as Linux does when memory runs out"
        elif _NO_THREAD.search(last):
            cause = ": no more threads may be started (ulimit -u, or the container's limit)"
        times = "once" if decision.exit_count == 1 else f"{decision.exit_count} times"
        within_s = decision.within_ms / 1_000
        return (
            f"{self.spec.name} died {times} in {within_s:.0f} s and is given up{cause}; "
            f"its last words: {last[:300]}"
        )

    @staticmethod
    def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _deaths_text(decision: GiveUp) -> str:
    deaths = "1 death" if decision.exit_count == 1 else f"{decision.exit_count} deaths"
    return f"{deaths} in {decision.within_ms / 1_000:.0f} s"


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
