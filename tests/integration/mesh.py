"""A whole mesh for tests: ``pagemesh up`` as a user runs it, with real processes.

with Mesh(pool_dir, model=folder, decode=2) as mesh:
    requests to mesh.url
    mesh.kill("decode")
    mesh.wait_ready()
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil
from tests.support.leaks import pool_files

from pagemesh.runtime.bus import Bus
from pagemesh.runtime.ids import host_name, new_service_name
from pagemesh.runtime.rpc import call
from pagemesh.runtime.settings import BusConfig
from pagemesh.wire import subjects
from pagemesh.wire.errors import Absent
from pagemesh.wire.pager_reports import InspectPager, PagerReport

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.05


def service_name(role: str, index: int = 0) -> str:
    """The name of the ``index``-th service of a role, as ``up`` shows it."""
    return f"{role}-{index}" if role in ("prefill", "decode") else role


class Mesh:
    """``pool_dir`` is the test's own folder; ``env`` are further ``PAGEMESH_*`` variables and
    ``flags`` further flags of ``up``. With ``handover``, prompts always go to the prefill worker;
    without, the decode worker computes most of those that come together. With ``cores``, all
    processes run on these alone. The stderr of ``up`` is in ``log``."""

    def __init__(
        self,
        pool_dir: Path,
        *,
        model: Path | None = None,
        prefill: int = 1,
        decode: int = 1,
        deterministic: bool = False,
        pool_bytes: int = 8 << 20,
        handover: bool = False,
        env: Mapping[str, str] | None = None,
        flags: tuple[str, ...] = (),
        cores: Collection[int] = (),
    ) -> None:
        self.pool_dir = pool_dir
        self.url = ""
        self.start_seconds = 0.0
        self._log_path = pool_dir.parent / f"{pool_dir.name}.up.log"
        self._process: subprocess.Popen[str] | None = None
        self._cores = cores
        clean = {key: text for key, text in os.environ.items() if not key.startswith("PAGEMESH_")}
        self._environ = clean | {
            "PAGEMESH_POOL_DIR": str(pool_dir),
            "PAGEMESH_POOL_BYTES": str(pool_bytes),
            "PAGEMESH_DETERMINISTIC": "true" if deterministic else "false",
            "PAGEMESH_MODEL": str(model) if model else "",
            "PAGEMESH_CACHE_DIR": str(pool_dir.parent / "prepared"),
            "PAGEMESH_DISAGGREGATE": "always" if handover else "auto",
            **(env or {}),
        }
        counts = ("--prefill", str(prefill), "--decode", str(decode))
        self._command = (
            sys.executable, "-m", "pagemesh.cli", "up", "--http", "127.0.0.1:0", *counts, *flags,
        )  # fmt: skip

    # --- life

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait for the ready line. Raises ``AssertionError`` with the log."""
        started = time.monotonic()
        with self._log_path.open("a") as log, _starting_on(self._cores):
            self._process = subprocess.Popen(
                self._command, env=self._environ, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        assert self._process.stdout is not None
        watchdog = _kill_after(self._process, START_TIMEOUT_S)
        line = self._process.stdout.readline()
        watchdog.cancel()
        if not line.startswith("ready "):
            self._end()
            raise AssertionError(f"not ready but {line!r}:\n{self.log}")
        self.url = line.split()[1]
        self.start_seconds = time.monotonic() - started

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Ask ``up`` to stop, as Ctrl-C does; returns its exit code. May be called twice."""
        if self._process is None:
            return 0
        self._process.send_signal(number)
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        finally:
            self._end()

    def interrupt(self) -> None:
        """Send Ctrl-C, without waiting for its effect."""
        self._running().send_signal(signal.SIGINT)

    def kill_up(self) -> None:
        """Kill ``up`` itself by SIGKILL; its children have to end by themselves."""
        process = self._running()
        process.kill()
        process.wait()
        self._end()

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    # --- processes

    def pids(self) -> dict[str, int]:
        """Service name (``nats``, ``pager``, ``prefill-0``, ``gateway``, ...) -> pid."""
        found: dict[str, int] = {}
        for child in psutil.Process(self._running().pid).children():
            try:
                command, environ = child.cmdline(), child.environ()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if any(part.endswith("nats-server") for part in command[:1]):
                found["nats"] = child.pid
            elif "serve" in command and "PAGEMESH_NAME" in environ:
                found[environ["PAGEMESH_NAME"]] = child.pid
        return found

    def cores(self) -> set[int]:
        """The cores on which any thread of its processes may run."""
        found: set[int] = set()
        for pid in (self.up_pid, *self.pids().values()):
            for thread in psutil.Process(pid).threads():
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    found |= os.sched_getaffinity(thread.id)
        return found

    @property
    def up_pid(self) -> int:
        """The pid of ``pagemesh up`` itself."""
        return self._running().pid

    def pid(self, role: str, index: int = 0) -> int:
        """The pid of the ``index``-th service of a role; waits for it if it is being restarted."""
        name = service_name(role, index)
        found: dict[str, int] = {}

        def is_there() -> bool:
            found.update(self.pids())
            return name in found

        self.wait_for(is_there, f"a process of {name}")
        return found[name]

    def kill(self, role: str, index: int = 0, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to one service; returns its pid."""
        pid = self.pid(role, index)
        os.kill(pid, number)
        return pid

    # --- asking

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until the gateway reports that requests are served."""
        self.wait_for(self.is_ready, "the mesh to be ready", timeout_s)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health/ready", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
        """Poll ``condition``. Raises ``AssertionError`` with the log after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}:\n{self.log[-4_000:]}"
            time.sleep(_POLL_S)

    def nats_url(self, role: str = "client") -> str:
        """The URL with user and password of a ``client`` or an ``operator``."""
        [found] = self.pool_dir.glob(f"up-*/{role}.url")
        return found.read_text().strip()

    def bus_config(self, role: str = "client") -> BusConfig:
        return BusConfig(url=self.nats_url(role))

    def report(self) -> PagerReport:
        """The pager's ledger and leases."""
        return asyncio.run(self.ask_report())

    async def ask_report(self) -> PagerReport:
        name = new_service_name("test")
        async with Bus.connect(self.bus_config("operator"), role="operator", name=name) as bus:
            subject = subjects.pager_report(host_name())
            return await call(bus, subject, InspectPager(), PagerReport, timeout_ms=5_000)

    def wait_idle(self, timeout_s: float = 15.0) -> PagerReport:
        """Wait until there is a pager without leases, tickets or pinned pages; returns its
        report."""
        last: list[PagerReport] = []

        def idle() -> bool:
            try:
                report = self.report()
            except Absent:  # the pager is being restarted
                return False
            last[:] = [report]
            pinned = report.held_pages + report.pinned_pages + report.draining_pages
            return pinned + len(report.leases) + report.ticket_count + report.waiter_count == 0

        self.wait_for(idle, "every page to be given back", timeout_s)
        [report] = last
        assert report.free_pages + report.idle_pages == report.total_pages
        return report

    def left_files(self) -> set[Path]:
        """Pool and lock files that still exist."""
        return pool_files(self.pool_dir)

    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None, "the mesh does not run"
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


@contextlib.contextmanager
def _starting_on(cores: Collection[int]) -> Iterator[None]:
    """While inside, this thread and the processes it starts run on ``cores`` alone, if given."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _kill_after(process: subprocess.Popen[str], after_s: float) -> threading.Timer:
    """Kill the process after a while, so that a missing ready line does not block its reader for
    ever."""
    timer = threading.Timer(after_s, process.kill)
    timer.daemon = True
    timer.start()
    return timer


def error_line(arguments: list[str], environ: Mapping[str, str]) -> tuple[int, str]:
    """Exit code and last line of stderr of a ``pagemesh`` command that is expected to fail."""
    done = subprocess.run(
        [sys.executable, "-m", "pagemesh.cli", *arguments],
        env=dict(environ), capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False,
    )  # fmt: skip
    return done.returncode, (done.stderr.splitlines() or [""])[-1]
