"""Two services of one name get each other's messages: the second gateway of a name gives way, and
gateways warn of any other two."""

from __future__ import annotations

from pagemesh.runtime.bus import Bus
from pagemesh.runtime.claim import Claim
from pagemesh.runtime.directory import Doubled
from pagemesh.runtime.logs import get_logger
from pagemesh.wire import subjects
from pagemesh.wire.presence import Announce, AskPresence

_log = get_logger(__name__)


def warn_of_namesakes(found: Doubled) -> None:
    one, other = found.announce, found.other
    _log.warning(
        "gateway.two_of_a_name", role=one.role, shared_name=one.name, hosts=[other.host, one.host],
        next="they get each other's messages, so requests stall or one of them stands idle: give "
        "each a name of its own, or none (--name)",
    )  # fmt: skip


class NameClaim(Claim):
    """The claim of the gateway ``incarnation`` to its ``name``."""

    def __init__(self, bus: Bus, name: str, incarnation: int) -> None:
        # Every gateway refuses this one there.
        super().__init__(bus, incarnation, subjects.gateway(name), AskPresence())
        self._name, self._url = name, bus.config.shown_url

    def is_rival(self, other: Announce) -> bool:
        return (other.role, other.name) == ("gateway", self._name)

    def refusal(self, other: Announce) -> str:
        return (
            f"gateway {other.name} of host {other.host} serves at {self._url} already; stop it, or "
            "give this one another name, or none (--name)"
        )
