"""The main function of a service process: signals, exit codes, one line for a wrong setting."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

PROGRAM = """
import asyncio, resource, sys, time
from pagemesh.runtime.service import Stop, run_service
from pagemesh.runtime.settings import TelemetryConfig
from pagemesh.wire.errors import ConfigError

async def drains(stop: Stop) -> None:
    print("ready", flush=True)
    await stop.wait()
    print("drained", flush=True)

async def tells_limits(stop: Stop) -> None:
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))

async def never_drains(stop: Stop) -> None:
    print("ready", flush=True)
    await asyncio.Event().wait()

async def computes(stop: Stop) -> None:
    import threading
    threading.Thread(target=time.sleep, args=(15,)).start()
    stop.end_hard()
    await never_drains(stop)

async def wrong(stop: Stop) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(refuse())

async def refuse() -> None:
    raise ConfigError("PAGEMESH_X='a\\nb' is not a number")

async def crashes(stop: Stop) -> None:
    raise RuntimeError("the prompt was: my secret")

async def blocks(stop: Stop) -> None:
    await asyncio.sleep(1.2)
    time.sleep(600)

sys.exit(run_service(
    globals()[sys.argv[1]], service="pager", telemetry=TelemetryConfig(), drain_ms=500,
    pulse_fd=int(sys.argv[2]) if len(sys.argv) > 2 else None,
))
"""


def start(
    tmp_path: Path,
    what: str,
    pulse_fd: int | None = None,
    open_files: tuple[int, int] | None = None,
    log: int | IO[str] = subprocess.PIPE,
) -> subprocess.Popen[str]:
    program = tmp_path / "program.py"
    limit = f"resource.setrlimit(resource.RLIMIT_NOFILE, {open_files})\n" if open_files else ""
    program.write_text(PROGRAM.replace("sys.exit", limit + "sys.exit", 1))
    more = [] if pulse_fd is None else [str(pulse_fd)]
    process = subprocess.Popen(
        [sys.executable, str(program), what, *more],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        pass_fds=[] if pulse_fd is None else [pulse_fd],
    )
    if what.endswith("drains"):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("allowed", [(200, 300), (300, 300)])
def test_a_service_may_open_as_many_files_as_it_can_have(
    tmp_path: Path, allowed: tuple[int, int]
) -> None:
    process = start(tmp_path, "tells_limits", open_files=allowed)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "300 300\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains_and_exits_0(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "drains")
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "drained\n")


def test_a_service_whose_log_is_on_a_full_disk_drains_like_any_other(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        process = start(tmp_path, "drains", log=full)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "drained\n")


def test_what_does_not_drain_in_time_is_ended_with_1(tmp_path: Path) -> None:
    process = start(tmp_path, "never_drains")
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert 0.4 < time.monotonic() - started < 5.0
    assert "service.not_drained" in err


def test_the_second_signal_does_not_wait_and_the_log_says_that_it_came(tmp_path: Path) -> None:
    process = start(tmp_path, "never_drains")
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "service.cut_off" in err
    assert "not_drained" not in err


def test_a_thread_that_nothing_ends_is_not_waited_for_and_the_log_says_why(
    tmp_path: Path,
) -> None:
    process = start(tmp_path, "computes")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert time.monotonic() - started < 5.0
    assert "service.not_drained" in err


def test_a_wrong_setting_is_one_line_and_exit_2(tmp_path: Path) -> None:
    process = start(tmp_path, "wrong")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert err == "pagemesh pager: PAGEMESH_X='a b' is not a number\n"


def test_a_crash_is_exit_1_and_does_not_tell_prompts(tmp_path: Path) -> None:
    process = start(tmp_path, "crashes")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "service.crashed" in err
    assert "RuntimeError" in err
    assert "secret" not in err


def test_a_service_beats_until_its_event_loop_stands_still(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    process = start(tmp_path, "blocks", writing)
    os.close(writing)
    try:
        beats = b""
        while select.select([reading], [], [], 20.0 if len(beats) < 3 else 2.0)[0]:
            beats += os.read(reading, 64)
        assert process.poll() is None, "it is alive, and silent"
        assert beats == b"." * len(beats) and 3 <= len(beats) <= 4
    finally:
        process.kill()
        process.communicate()
        os.close(reading)
