"""Warns of hosts that two pagers serve, since each call is then answered by both. When one of them
is gone, the gateway is told of the other again."""

from __future__ import annotations

import asyncio

from pagemesh.runtime.directory import Directory
from pagemesh.runtime.logs import get_logger
from pagemesh.wire.presence import PRESENCE_LOST_MS, PRESENCE_PERIOD_MS, Announce

_SURE_S = (PRESENCE_LOST_MS + 2 * PRESENCE_PERIOD_MS) / 1_000
"""By then a pager that was killed and replaced counts as lost."""
_AGAIN_S = 60.0
_log = get_logger(__name__)


class TwoPagers:
    """``directory`` knows which pagers there are."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._watched: dict[str, asyncio.TimerHandle] = {}
        """By host: the next look."""

    def joined(self, pager: Announce) -> None:
        """Take note of a pager that has come."""
        if pager.host not in self._watched and len(self._names(pager.host)) > 1:
            self._look_in(_SURE_S, pager.host)

    def lost(self, pager: Announce) -> None:
        """Take note of a pager that is gone. What the router knew of the host went with it, so
        another pager of that host is to be told of again."""
        for other in self._directory.of_role("pager"):
            if other.host == pager.host:
                self._directory.doubt(other.name, other.incarnation)

    def close(self) -> None:
        """Look no more."""
        for timer in self._watched.values():
            timer.cancel()
        self._watched.clear()

    def _look_in(self, seconds: float, host: str) -> None:
        loop = asyncio.get_running_loop()
        self._watched[host] = loop.call_later(seconds, self._look, host)

    def _look(self, host: str) -> None:
        names = self._names(host)
        if len(names) < 2:
            del self._watched[host]
            return
        _log.warning(
            "gateway.two_pagers", host=host, pagers=names,
            next="calls to that host's pager are answered by each of them, which makes requests "
            "slow: stop all but one, or give each host a name of its own (--host)",
        )  # fmt: skip
        self._look_in(_AGAIN_S, host)

    def _names(self, host: str) -> list[str]:
        pagers = self._directory.of_role("pager")
        return [one.name for one in pagers if one.host == host and one.state != "draining"]
