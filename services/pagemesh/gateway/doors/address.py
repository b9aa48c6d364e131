"""The HTTP door's address: bound early, but listened on only once requests can be answered."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator

from pagemesh.runtime.ports import bound_socket, shown_address
from pagemesh.wire.errors import ConfigError

CONNECTIONS_BACKLOG = 1_024


def take_address(host: str, port: int) -> socket.socket:
    """A socket bound to the address; connections are refused until :func:`listen`. An address that
    is in use is thus reported before anything is loaded or joined. Raises ``ConfigError`` that
    names the address."""
    with _named(host, port):
        return bound_socket(host, port)


def listen(taken: socket.socket) -> None:
    """Accept connections from now on. Raises ``ConfigError`` if another process that was bound to
    the address at the same time listened first."""
    host, port = taken.getsockname()[:2]
    with _named(host, port):
        taken.listen(CONNECTIONS_BACKLOG)


@contextlib.contextmanager
def _named(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
        stop = "stop what listens there or " if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(
            f"cannot serve at {shown_address(host, port)}: {reason}; {stop}set "
            "PAGEMESH_HTTP_HOST and PAGEMESH_HTTP_PORT (--http-host, --http-port)"
        ) from None
