"""What can happen to a worker, and what its core asks to be done: plain values.

The actor feeds events to ``WorkerCore.take`` and ``go_on`` and performs the commands they return,
in order. Every call it makes is answered exactly once: by the reply, or by a ``Refused`` that
says how the transport failed (``DeadlineExceeded``, ``Disconnected``, ``Absent``).
"""

from __future__ import annotations

from dataclasses import dataclass

from pagemesh.engine.worker.plan import NO_READERS, Readers, StepPlan, StepResult
from pagemesh.wire.messages import Message, SequenceKey
from pagemesh.wire.pager_messages import SessionOpened
from pagemesh.wire.work_messages import Finish, Frames

Call = int
"""The actor's name for one request that wants an answer."""
CallId = int
"""The core's name for one call that it makes."""

# Events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A message on the worker's subject; ``call`` is None when nobody waits for an answer."""

    call: Call | None
    message: Message


@dataclass(frozen=True, slots=True)
class PagerAnswered:
    call_id: CallId
    message: Message


@dataclass(frozen=True, slots=True)
class PeerAnswered:
    call_id: CallId
    message: Message


@dataclass(frozen=True, slots=True)
class StepsFinished:
    """A step is over, or several of one run. ``goes_on``: the next one has begun already.
    ``readers``: of other workers whose steps take turns with this one's."""

    results: tuple[StepResult, ...]
    goes_on: bool = False
    readers: Readers = NO_READERS


@dataclass(frozen=True, slots=True)
class PagerChanged:
    """The pager of this host announced itself under ``epoch``."""

    epoch: int


@dataclass(frozen=True, slots=True)
class PagerLost:
    """The pager is silent: calls to it are spaced out until it is heard of again."""


@dataclass(frozen=True, slots=True)
class PoolMissing:
    """The pool of that incarnation, which ``UsePool`` named, is not to be mapped: its pager
    may have ended with it. Nothing was computed on it."""

    pool_incarnation: int


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """That life of a gateway is over; nobody waits for its sequences."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class WorkerLost:
    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Accept nothing new; what is left after ``grace_ms`` is reported ``Gone``."""

    grace_ms: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. Sent when ``WorkerCore.patience_ms`` is over; the first one starts the core."""


Event = (
    Received
    | PagerAnswered
    | PeerAnswered
    | StepsFinished
    | PagerChanged
    | PagerLost
    | PoolMissing
    | GatewayLost
    | WorkerLost
    | Drain
    | Tick
)

# Commands -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    call: Call
    message: Message


@dataclass(frozen=True, slots=True)
class CallPager:
    call_id: CallId
    message: Message
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class CallWorker:
    worker: str
    call_id: CallId
    message: Message
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class SendFrames:
    gateway: str
    frames: Frames


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run it off the event loop, and the steps of its run; ``StepsFinished`` must follow, the
    last of them without ``goes_on``. At most one plan is running."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class EndRun:
    """Let no further step of the run begin: its plan is out of date. Harmless when it is over."""


@dataclass(frozen=True, slots=True)
class UsePool:
    """Map this pool before any later ``RunStep``; a pool mapped before is of no use. When it is
    not there, ``PoolMissing`` follows, and rows of plans meanwhile are reported revoked."""

    opened: SessionOpened


@dataclass(frozen=True, slots=True)
class Preempted:
    """A lease with computed tokens was taken away. People are told of it (``preemptions``): of the
    request, what is lost, and the pager's own words on who uses the pool."""

    key: SequenceKey
    lost_tokens: int
    reason: str
    usage: str


@dataclass(frozen=True, slots=True)
class SequenceFacts:
    """One sequence's life at this worker, for its span."""

    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    computed_tokens: int
    preempted_count: int
    lost_tokens: int
    saved_pages: int
    """Pages not held, since its beams or choices shared them; at the moment of the most."""
    finish: Finish | None
    """None: it went on elsewhere."""
    error_code: str
    """Empty unless it failed."""


@dataclass(frozen=True, slots=True)
class Finished:
    key: SequenceKey
    facts: SequenceFacts


@dataclass(frozen=True, slots=True)
class Drained:
    """After ``Drain``: nothing is left to do and nothing is owed to the pager."""


Command = (
    Answer
    | CallPager
    | CallWorker
    | SendFrames
    | RunStep
    | EndRun
    | UsePool
    | Preempted
    | Finished
    | Drained
)
