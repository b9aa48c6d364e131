"""Whether a worker is probably on its way back, so that a new request may wait for it. Pure.

    ready --silent, replaced, absent--> missing --ready--> (nothing to wait for)
      |                                    |
      |                                    +-- window over, or a good-bye --> not expected
      +--starting (loads, or has no pager)--> expected for as long as it says so

A worker that died is restarted by whatever supervises it, mostly within seconds; one that said
good-bye was meant to go.
"""

from __future__ import annotations

from pagemesh.runtime.directory import Change, Lost

NAMES_MAX = 4_096


class Returning:
    """``window_ms``: how long a worker that vanished is waited for."""

    def __init__(self, *, window_ms: int) -> None:
        self._window_ms = window_ms
        self._starting: set[str] = set()
        self._missing_since_ms: dict[str, int] = {}

    def changed(self, change: Change, now_ms: int) -> None:
        """Presence reported a change of a worker."""
        announce = change.announce
        name = announce.name
        self._starting.discard(name)
        if isinstance(change, Lost) and change.reason != "left":
            self.vanished(name, now_ms)
            return
        self._missing_since_ms.pop(name, None)
        if announce.state == "starting" and len(self._starting) < NAMES_MAX:
            self._starting.add(name)

    def of_others(self, name: str) -> None:
        """Presence reported a worker that serves another model: no request here waits for it."""
        self._starting.discard(name)
        self._missing_since_ms.pop(name, None)

    def vanished(self, name: str, now_ms: int) -> None:
        """Worker ``name`` went silent, was replaced or does not listen on its subject. One that is
        starting is expected already."""
        if name in self._starting:
            return
        self._forget_old(now_ms)
        if len(self._missing_since_ms) < NAMES_MAX:
            self._missing_since_ms.setdefault(name, now_ms)

    def expected(self, now_ms: int) -> bool:
        self._forget_old(now_ms)
        return bool(self._starting or self._missing_since_ms)

    def _forget_old(self, now_ms: int) -> None:
        old = now_ms - self._window_ms
        gone = [name for name, since_ms in self._missing_since_ms.items() if since_ms <= old]
        for name in gone:
            del self._missing_since_ms[name]

    def check(self) -> None:
        """Raises ``AssertionError`` when an invariant is broken."""
        assert not self._starting & self._missing_since_ms.keys(), "missing, and there"
        assert len(self._missing_since_ms) <= NAMES_MAX
