"""Warns when connections are about to be reset because the gateway may open no more files.

Beyond the limit the event loop accepts connections and closes them at once, those of health probes
too, without a word.
"""

from __future__ import annotations

from pagemesh.gateway import measures
from pagemesh.runtime.logs import get_logger
from pagemesh.runtime.open_files import few_open_files_left

SAID_PERIOD_S = 60.0
_log = get_logger(__name__)


class ScarceFiles:
    """``look`` is called about once a second."""

    def __init__(self) -> None:
        self._said_s: float | None = None

    def look(self, connection_count: int, now_s: float) -> None:
        """``connection_count`` of the open files are connections of clients; ``now_s`` is
        monotonic."""
        measures.connections.set(connection_count)
        if self._said_s is not None and now_s - self._said_s < SAID_PERIOD_S:
            return
        found = few_open_files_left(connection_count)
        if found is None:
            return
        self._said_s = now_s
        open_count, limit = found
        _log.warning(
            "gateway.open_files_scarce", open=open_count, limit=limit, connections=connection_count,
            next="connections beyond the limit are reset without an error: raise the limit on "
            "open files (nofile in /etc/security/limits.conf, LimitNOFILE of a systemd unit, "
            "ulimits of a container)",
        )  # fmt: skip
