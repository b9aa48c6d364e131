"""Exchange of one message and one open file between two processes of a host.

A Unix socket in a private folder, one packet each way and then the end of the connection:

    server   listen(path)   accept   receive -> Packet   send
    client   exchange(path, ...)                      -> Packet

The kernel copies the descriptor (``SCM_RIGHTS``), so both sides hold the same open file. The
permissions of folder and socket let only their owner connect.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKET_BYTES_MAX = 4_096
_BACKLOG = 16


@dataclass(frozen=True, slots=True)
class Packet:
    """A message, and the descriptor beside it, which its receiver has to close."""

    data: bytes
    descriptor: int | None = None

    def close(self) -> None:
        """Close the descriptor if there is one; for packets that nobody took."""
        if self.descriptor is not None:
            os.close(self.descriptor)


def listen(path: Path) -> socket.socket:
    """A listening socket at ``path``, which must not exist yet. Raises ``OSError``."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _short(path) as address:
            made.bind(address)
        path.chmod(0o600)
        made.listen(_BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def exchange(path: Path, packet: Packet, timeout_s: float) -> tuple[Packet, int]:
    """Send ``packet``, whose descriptor stays the caller's, to the process that listens at
    ``path``. Returns the answer and the listener's process id (0: not visible from here). Raises
    ``OSError``, which includes ``TimeoutError``."""
    with connected(path, timeout_s) as connection:
        send(connection, packet)
        return receive(connection), peer_pid(connection)


@contextlib.contextmanager
def connected(path: Path, timeout_s: float) -> Iterator[socket.socket]:
    """A connection to the process that listens at ``path``, for one packet each way, each within
    ``timeout_s``. Raises ``OSError``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout_s)
        with _short(path) as address:
            connection.connect(address)
        yield connection


def send(connection: socket.socket, packet: Packet) -> None:
    """Raises ``OSError``."""
    descriptors = [] if packet.descriptor is None else [packet.descriptor]
    socket.send_fds(connection, [packet.data], descriptors)


def receive(connection: socket.socket) -> Packet:
    """Raises ``OSError``, also when the other side closed without sending."""
    data, descriptors, flags, _ = socket.recv_fds(connection, PACKET_BYTES_MAX, 1)
    packet = Packet(data, descriptors[0] if descriptors else None)
    if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        packet.close()
        raise ConnectionError("the other side sent no whole packet")
    if packet.descriptor is not None:
        os.set_inheritable(packet.descriptor, False)
    return packet


def peer_pid(connection: socket.socket) -> int:
    """The process at the other end: for a client, the one that called ``listen``."""
    size = struct.calcsize("3i")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid: int = struct.unpack("3i", found)[0]
    return pid


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """An alias of ``path`` of few characters: a socket address has room for about a hundred."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
