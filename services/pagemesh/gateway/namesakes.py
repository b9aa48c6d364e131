"""Warns of two services of one name, which get each other's messages."""

from __future__ import annotations

from pagemesh.runtime.directory import Doubled
from pagemesh.runtime.logs import get_logger

_log = get_logger(__name__)


def warn_of_namesakes(found: Doubled) -> None:
    one, other = found.announce, found.other
    _log.warning(
        "gateway.two_of_a_name", role=one.role, shared_name=one.name, hosts=[other.host, one.host],
        next="they get each other's messages, so requests stall or one of them stands idle: give "
        "each a name of its own, or none (--name)",
    )  # fmt: skip
