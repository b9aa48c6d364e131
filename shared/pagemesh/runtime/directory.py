"""Which services are there: a pure core over announcements.

    (unknown) --heard--> present --silent too long, left, or a new incarnation--> lost
                            ^                                                       |
                            +----heard again, the same incarnation after silence----+

An incarnation that said good-bye is never believed again, so that a late message cannot bring it
back; nor is one that was replaced, for as long as its successor is heard. A successor that falls
silent may never have existed: a single damaged announcement must not make the others ignore a
live service until it is restarted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from pagemesh.wire.presence import PRESENCE_LOST_MS, Announce, Role

MEMBER_COUNT_MAX = 4_096
_GONE_COUNT_MAX = 4_096
_REPLACED_COUNT_MAX = 8
_DOUBLED_PERIOD_MS = 60_000
_ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class Joined:
    """A new incarnation is there."""

    announce: Announce


@dataclass(frozen=True, slots=True)
class Changed:
    """A known incarnation announced something new (state, load, model, events), or announced
    anything at all after ``doubt``."""

    announce: Announce


@dataclass(frozen=True, slots=True)
class Lost:
    """An incarnation is gone; ``announce`` is the last one that was heard from it."""

    announce: Announce
    reason: Literal["silent", "left", "replaced"]


@dataclass(frozen=True, slots=True)
class Doubled:
    """``other`` lives on, although ``announce`` has replaced it: two services share a name. Told
    now and then."""

    announce: Announce
    other: Announce


Change = Joined | Changed | Lost | Doubled


@dataclass(slots=True)
class _Member:
    announce: Announce
    heard_ms: int
    replaced: tuple[int, ...]
    """Earlier incarnations that are not believed because of this one."""
    doubled_due_ms: int
    """When one of those is worth telling of if it is heard. Late messages come sooner."""
    doubted: bool = False


class Directory:
    """A service is lost after ``lost_after_ms`` of silence."""

    def __init__(self, *, lost_after_ms: int = PRESENCE_LOST_MS) -> None:
        self._lost_after_ms = lost_after_ms
        self._members: dict[tuple[Role, str], _Member] = {}
        self._gone: deque[int] = deque(maxlen=_GONE_COUNT_MAX)

    def hear(self, announce: Announce, now_ms: int) -> list[Change]:
        """Take an announcement in; returns what it changed, in order."""
        key = (announce.role, announce.name)
        known = self._members.get(key)
        if announce.incarnation in self._gone:
            return self._lives_on(known, announce, now_ms)
        if announce.state == "leaving":
            self._gone.append(announce.incarnation)
            if known is None or known.announce.incarnation != announce.incarnation:
                return []
            self._believe(self._members.pop(key).replaced)
            return [Lost(announce, "left")]
        changes: list[Change] = []
        replaced: tuple[int, ...] = ()
        if known is not None and known.announce.incarnation != announce.incarnation:
            self._gone.append(known.announce.incarnation)
            replaced = (*known.replaced, known.announce.incarnation)[-_REPLACED_COUNT_MAX:]
            del self._members[key]
            changes.append(Lost(known.announce, "replaced"))
            known = None
        if known is None:
            if len(self._members) >= MEMBER_COUNT_MAX:
                return changes
            due_ms = now_ms + self._lost_after_ms
            self._members[key] = _Member(announce, now_ms, replaced, due_ms)
            return [*changes, Joined(announce)]
        if known.doubted or known.announce != announce:
            changes.append(Changed(announce))
        known.announce, known.doubted = announce, False
        known.heard_ms = now_ms
        return changes

    def _lives_on(self, known: _Member | None, other: Announce, now_ms: int) -> list[Change]:
        """What is to be told of ``other``, an incarnation that is not believed."""
        if known is None or other.incarnation not in known.replaced:
            return []
        if other.state in ("draining", "leaving") or now_ms <= known.doubled_due_ms:
            return []
        known.doubled_due_ms = now_ms + _DOUBLED_PERIOD_MS
        return [Doubled(known.announce, other)]

    def doubt(self, name: str, incarnation: int) -> None:
        """The caller found this incarnation absent, or gave it something to do: its next
        announcement counts as a change, even if it is the same as the last."""
        for role in _ROLES:
            member = self._members.get((role, name))
            if member is not None and member.announce.incarnation == incarnation:
                member.doubted = True

    def expire(self, now_ms: int) -> list[Change]:
        """Drop services that were silent for too long; call it at ``silent_ms``."""
        silent = [
            key
            for key, member in self._members.items()
            if now_ms - member.heard_ms > self._lost_after_ms
        ]
        return [self._silent(key) for key in silent]

    @property
    def silent_ms(self) -> int | None:
        """When ``expire`` will next report a lost service, unless it is heard before; None: no
        service is known."""
        heard = min((member.heard_ms for member in self._members.values()), default=None)
        return None if heard is None else heard + self._lost_after_ms + 1

    def _silent(self, key: tuple[Role, str]) -> Lost:
        member = self._members.pop(key)
        self._believe(member.replaced)
        return Lost(member.announce, "silent")

    def _believe(self, replaced: Iterable[int]) -> None:
        """What replaced these is gone: whoever of them is still heard lives."""
        for incarnation in replaced:
            if incarnation in self._gone:
                self._gone.remove(incarnation)

    def forgive(self, now_ms: int) -> None:
        """Count every service as heard now: this one could hear nothing (the bus was down)."""
        for member in self._members.values():
            member.heard_ms = now_ms

    def find(self, role: Role, name: str) -> Announce | None:
        member = self._members.get((role, name))
        return member.announce if member is not None else None

    def of_role(self, role: Role) -> list[Announce]:
        """All services of a role, ordered by name."""
        return [
            member.announce for (found, _), member in sorted(self._members.items()) if found == role
        ]

    def check(self) -> None:
        """Raises ``AssertionError`` when a member is also known to be gone."""
        for (role, name), member in self._members.items():
            assert (member.announce.role, member.announce.name) == (role, name)
            assert member.announce.incarnation not in self._gone, f"{name} is there and gone"
