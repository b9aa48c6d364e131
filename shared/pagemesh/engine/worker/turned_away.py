"""Logs why a worker has no session with a pager. The worker keeps asking for one for ever, since a
pager may be started or restarted later; without the log nobody would know what it waits for."""

from __future__ import annotations

from pagemesh.runtime.logs import get_logger
from pagemesh.wire.messages import Message, Refused

SILENT_US = 10_000_000
"""Silence that is not logged yet: a pager that is being started or restarted takes less."""
_OWN_FAULTS = frozenset({"Stale", "Malformed"})
"""Refusals because the pool does not fit this worker's model and settings."""
_UNANSWERED = frozenset({"Absent", "DeadlineExceeded", "Disconnected"})
_log = get_logger(__name__)


class TurnedAway:
    """``host``: the host whose pager is asked."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._since_us: int | None = None
        self._told = ""

    def heard(self, answer: Message, now_us: int) -> None:
        """Take the answer to an ``OpenSession``. A reason is logged once, until it changes or
        there is a session."""
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
            why, remedy = answer.message, "see the pager's log"
        if why != self._told:
            self._told = why
            _log.warning(
                "worker.no_session", why=why, remedy=remedy, next="the worker asks the pager again"
            )
