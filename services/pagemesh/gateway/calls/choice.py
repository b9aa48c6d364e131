"""One choice of a request: its delivered tokens and where its current attempt stands.

    WAITING -> ROUTING -> SUBMITTED -> RUNNING -> DONE
       ^          |           |           |
       +----------+-----------+-----------+        refused, lost, silent: attempt + 1

Every state may also go to DONE: the client left, or the request failed. Pure.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pagemesh.gateway.calls.events import Worker
from pagemesh.wire.pager_messages import Waterfall
from pagemesh.wire.tokens import U32
from pagemesh.wire.work_messages import TopLogprobs

_HISTORY_MAX = 16
_QUIET_MS = 1_000
"""For how long frames that crossed an abort may still arrive."""


class ChoiceState(enum.Enum):
    WAITING = "waiting"
    ROUTING = "routing"
    SUBMITTED = "submitted"
    RUNNING = "running"
    DONE = "done"


_S = ChoiceState
_MOVES = {
    _S.WAITING: {_S.ROUTING, _S.DONE},
    _S.ROUTING: {_S.SUBMITTED, _S.WAITING, _S.DONE},
    _S.SUBMITTED: {_S.RUNNING, _S.WAITING, _S.DONE},
    _S.RUNNING: {_S.WAITING, _S.DONE},
    _S.DONE: set[ChoiceState](),
}


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The text of a run of tokens. ``used_count`` of them count; the rest came after ``stop``, the
    stop string that they completed."""

    text: str
    used_count: int
    stop: str | None = None


class ChoiceText(Protocol):
    """Turns the tokens of one choice into text, finding stop strings."""

    def push(self, tokens: U32) -> TextPiece: ...

    def close(self) -> str:
        """The text that was held back. Nothing may be pushed after this."""
        ...


class TokensOnly:
    """No text at all: for tests and simulation."""

    def push(self, tokens: U32) -> TextPiece:
        return TextPiece("", len(tokens))

    def close(self) -> str:
        return ""


@dataclass(slots=True)
class Choice:
    index: int
    text: ChoiceText
    due_ms: int
    """In WAITING: when to try (again). Otherwise: when to ask about a silent attempt."""
    state: ChoiceState = ChoiceState.WAITING
    attempt: int = 0
    """0: none was made yet."""
    generated: bytearray = field(default_factory=bytearray)
    """Packed token ids as received: never shortened, never changed."""
    used_count: int = 0
    """Tokens that count: fewer than received when a stop string ended the choice."""
    holder: Worker | None = None
    """The worker that sent the last frame of this attempt."""
    failure_count: int = 0
    """Attempts that failed since the last new token."""
    failure: str = ""
    """The code of the fault that ended the last attempt."""
    resend_count: int = 0
    """Times we asked for lost frames since the last new token."""
    resend_ms: int | None = None
    """When a resend was last requested for a gap, so that one gap asks only once."""
    probes: dict[Worker, bool] = field(default_factory=dict)
    """Workers asked after a silence: True once one said that it does not know the choice."""
    overheard_ms: dict[int, int] = field(default_factory=dict)
    """By attempt that is over: when a worker was first heard to continue it, or last told to
    stop."""
    waterfall: Waterfall | None = None
    computed_tokens: int = 0
    avoid: set[Worker] = field(default_factory=set)
    history: deque[str] = field(default_factory=lambda: deque(maxlen=_HISTORY_MAX))

    @property
    def token_count(self) -> int:
        return len(self.generated) // 4

    @property
    def live(self) -> bool:
        return self.state is not ChoiceState.DONE

    @property
    def placed(self) -> bool:
        """Some worker has it, or may have."""
        return self.state in (ChoiceState.SUBMITTED, ChoiceState.RUNNING)

    def failed(self, code: str) -> None:
        """Its attempt ended with such a fault."""
        self.failure_count, self.failure = self.failure_count + 1, code

    def move(self, state: ChoiceState, why: str) -> None:
        """Raises ``AssertionError`` with the history when the table forbids the move."""
        line = f"{self.state.value}->{state.value} ({why})"
        if state not in _MOVES[self.state]:
            past = "; ".join(self.history)
            raise AssertionError(f"choice {self.index}: illegal {line} after {past}")
        self.history.append(line)
        self.state = state

    def submitted(self, attempt: int) -> None:
        """``attempt`` was sent: no worker holds it yet, and none of its frames are missing."""
        self.attempt, self.holder = attempt, None
        self.resend_count, self.resend_ms = 0, None
        self.move(ChoiceState.SUBMITTED, f"attempt {attempt}")

    def overheard(self, attempt: int, now_ms: int) -> bool:
        """A worker continues ``attempt``, which is over. True: its abort was lost, so send one."""
        if now_ms - self.overheard_ms.setdefault(attempt, now_ms) < _QUIET_MS:
            return False
        self.overheard_ms[attempt] = now_ms
        return True

    def heard(self, now_ms: int, silence_ms: int) -> None:
        """A sign of life of this attempt."""
        self.probes.clear()
        self.due_ms = now_ms + silence_ms

    def tokens(self) -> U32:
        """Every received token: uint32 [token_count]."""
        return np.frombuffer(bytes(self.generated), "<u4")


_UNTIMED = (ChoiceState.ROUTING, ChoiceState.DONE)


def next_ms(choices: Iterable[Choice], latest_ms: int) -> int:
    """When the first of ``choices`` is due, ``latest_ms`` at the latest."""
    for choice in choices:
        if choice.due_ms < latest_ms and choice.state not in _UNTIMED:
            latest_ms = choice.due_ms
    return latest_ms


def slice_logprobs(scores: TopLogprobs, first: int, last: int) -> TopLogprobs:
    """Rows ``[first, last)`` of ``scores``."""
    width = scores.width
    return TopLogprobs(
        chosen=scores.chosen[4 * first : 4 * last],
        width=width,
        top_tokens=scores.top_tokens[4 * width * first : 4 * width * last],
        top_values=scores.top_values[4 * width * first : 4 * width * last],
    )
