"""A second gateway of a name gives way; gateways warn of two services of one name."""

from __future__ import annotations

from msgspec import structs
from structlog.testing import capture_logs
from tests.unit.gateway.routes import worker

from pagemesh.gateway.namesakes import NameClaim, warn_of_namesakes
from pagemesh.runtime.bus import Bus
from pagemesh.runtime.directory import Directory, Doubled
from pagemesh.wire.presence import PRESENCE_LOST_MS, Announce


def test_two_services_of_one_name_are_named_with_their_hosts() -> None:
    directory = Directory()
    one = worker("d", "decode", host="a")
    directory.hear(one, 0)
    directory.hear(structs.replace(one, host="b", incarnation=2), 1)
    with capture_logs() as logs:
        for change in directory.hear(one, PRESENCE_LOST_MS + 2):
            assert isinstance(change, Doubled)
            warn_of_namesakes(change)
    told = [(line["event"], line["role"], line["shared_name"], line["hosts"]) for line in logs]
    assert told == [("gateway.two_of_a_name", "decode", "d", ["a", "b"])]


def test_only_gateways_of_the_name_count_wherever_they_are(bus: Bus) -> None:
    claim = NameClaim(bus, "g", 5)
    other = Announce(role="gateway", name="g", incarnation=1, host="elsewhere", state="ready")
    assert claim.is_rival(other)
    assert not claim.is_rival(structs.replace(other, role="decode"))
    assert not claim.is_rival(structs.replace(other, name="h"))
