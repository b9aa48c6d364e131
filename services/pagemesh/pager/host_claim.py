"""One pager a host: two of one name would both answer what is meant for one."""

from __future__ import annotations

from pagemesh.runtime.bus import Bus
from pagemesh.runtime.claim import Claim
from pagemesh.wire import subjects
from pagemesh.wire.pager_reports import SnapshotWanted
from pagemesh.wire.presence import Announce

_NO_PAGES = SnapshotWanted(first=1 << 31)
"""What every pager answers, with an empty listing."""


class HostClaim(Claim):
    """The claim of the pager ``incarnation`` to the name ``host``."""

    def __init__(self, bus: Bus, host: str, incarnation: int) -> None:
        super().__init__(bus, incarnation, subjects.pager(host), _NO_PAGES)
        self._host, self._url = host, bus.config.shown_url

    def is_rival(self, other: Announce) -> bool:
        return (other.role, other.host) == ("pager", self._host)

    def refusal(self, other: Announce) -> str:
        return (
            f"pager {other.name} serves host {self._host} at {self._url} already; stop it, or give "
            "this one and its workers another host name (--host)"
        )
