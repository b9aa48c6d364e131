"""Says in the log why a worker has no session with a pager. It asks for one for ever, since the
pager may be started yet, or again: nobody else would know what it waits for."""

from __future__ import annotations

from pagemesh.runtime.logs import get_logger
from pagemesh.wire.messages import Message, Refused

SILENT_US = 10_000_000
"""A pager that is being started, or started again, takes less."""
_OWN_FAULTS = frozenset({"Stale", "Malformed"})
"""The pool is another one than this worker's model and settings want."""
_UNANSWERED = frozenset({"Absent", "DeadlineExceeded", "Disconnected"})
_log = get_logger(__name__)


class TurnedAway:
    """``host``: whose pager it asks."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._since_us: int | None = None
        self._told = ""

    def heard(self, answer: Message, now_us: int) -> None:
        """What came of asking for a session. Each reason is told once, until there is a session."""
        if not isinstance(answer, Refused):
            self._since_us, self._told = None, ""
            return
        if self._since_us is None:
            self._since_us = now_us
        if answer.code in _OWN_FAULTS:
            why, remedy = answer.message, "give all workers of a host the same model and settings"
        elif now_us - self._since_us < SILENT_US:
            return
        elif answer.code in _UNANSWERED:
            why = f"no pager of host {self._host} answers ({answer.message})"
            remedy = "start one (`pagemesh serve pager`), or name its host (--host)"
        else:
            why, remedy = answer.message, "see the log of the pager"
        if why != self._told:
            self._told = why
            _log.warning(
                "worker.no_session", why=why, remedy=remedy, next="the pager is asked again"
            )
