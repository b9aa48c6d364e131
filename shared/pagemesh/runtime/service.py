"""The main function every service process shares: event loop, signals, exit codes.

    0    drained and done           1    crashed, or did not finish draining
    2    a setting is wrong: one line on stderr says which

The first SIGTERM or SIGINT asks the service to drain. The second, or the drain limit, cuts it
off, and the log says which of the two it was.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator

import uvloop

from pagemesh.runtime.logs import get_logger, set_up_logs
from pagemesh.runtime.metrics import serve_metrics
from pagemesh.runtime.open_files import allow_open_files
from pagemesh.runtime.pulse import beat
from pagemesh.runtime.settings import TelemetryConfig
from pagemesh.runtime.spans import set_up_spans
from pagemesh.runtime.unheard import Unheard
from pagemesh.wire.errors import ConfigError

EXIT_OK = 0
EXIT_CRASHED = 1
EXIT_CONFIG = 2
_log = get_logger(__name__)


class Stop:
    """Set when the service is to drain."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.ends_hard = False

    def end_hard(self) -> None:
        """Exit without waiting for anything once ``main`` is over and the log says why: a thread is
        running that only the end of the process can end."""
        self.ends_hard = True

    def request(self) -> None:
        self._event.set()

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()


def run_service(
    main: Callable[[Stop], Awaitable[None]],
    *,
    service: str,
    telemetry: TelemetryConfig,
    drain_ms: int,
    name: str = "",
    pulse_fd: int | None = None,
) -> int:
    """Run ``main`` on uvloop until it returns; gives the exit code.

    ``service`` is the role, ``name`` this instance of it, ``drain_ms`` its time from the request
    to stop until it is cut off. Logs, traces and the service's own metrics (if a port is
    configured) are set up here and only here. ``main`` starts its actors in a ``TaskGroup``,
    waits for ``stop``, drains and returns. ``pulse_fd`` is a pipe on which the parent process
    listens for signs of life.
    """
    set_up_logs(telemetry, service=service, name=name)
    allow_open_files()
    try:
        with serve_metrics(telemetry), set_up_spans(telemetry, service=service, name=name):
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_guarded(main, service, drain_ms, pulse_fd))
    except ConfigError as error:
        return _config_exit(service, error)


async def _guarded(
    main: Callable[[Stop], Awaitable[None]],
    service: str,
    drain_ms: int,
    pulse_fd: int | None,
) -> int:
    stop = Stop()
    loop = asyncio.get_running_loop()
    work = asyncio.ensure_future(main(stop))
    pulse = None if pulse_fd is None else loop.create_task(beat(pulse_fd), name="pulse")
    try:
        code = await _until_stopped(work, stop, service, drain_ms)
    finally:
        if pulse is not None:
            pulse.cancel()
    if stop.ends_hard:
        os._exit(code)
    return code


async def _until_stopped(
    work: asyncio.Future[None], stop: Stop, service: str, drain_ms: int
) -> int:
    loop = asyncio.get_running_loop()
    signal_count = 0

    def on_signal() -> None:
        nonlocal signal_count
        signal_count += 1
        if stop.requested:
            work.cancel()
        else:
            _log.info("service.draining")
            stop.request()
            loop.call_later(drain_ms / 1_000, work.cancel)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        await work
    except asyncio.CancelledError:
        if signal_count > 1:
            _log.warning("service.cut_off", reason="a second signal arrived while it was draining")
        else:
            _log.error("service.not_drained", within_ms=drain_ms)
        return EXIT_CRASHED
    except BaseException as error:
        for part in _leaves(error):
            if isinstance(part, ConfigError):
                return _config_exit(service, part)
        for part in _leaves(error):
            _log.error("service.crashed", error=part)
        return EXIT_CRASHED
    _log.info("service.stopped")
    return EXIT_OK


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error


def _config_exit(service: str, error: ConfigError) -> int:
    line = " ".join(str(error).split())
    Unheard().write(f"pagemesh {service}: {line}\n")
    return EXIT_CONFIG
