"""Events that a worker's core takes and commands that it returns: plain values.

The actor feeds events to ``WorkerCore.take``, calls ``go_on``, and performs the commands that both
return, in order. Every call among them is answered exactly once: by the reply, or by a ``Refused``
that says how the transport failed (``DeadlineExceeded``, ``Disconnected``, ``Absent``).
"""

from __future__ import annotations

from dataclasses import dataclass

from pagemesh.engine.worker.plan import NO_READERS, Readers, StepPlan, StepResult
from pagemesh.wire.messages import Message, SequenceKey
from pagemesh.wire.pager_messages import SessionOpened
from pagemesh.wire.work_messages import Finish, Frames

Call = int
"""The actor's number for a request that waits for an answer."""
CallId = int
"""The core's number for a call that it makes."""

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
    """One step has ended, or several of a run. ``goes_on``: the next one has already begun.
    ``readers``: those of other workers whose steps take turns with ours."""

    results: tuple[StepResult, ...]
    goes_on: bool = False
    readers: Readers = NO_READERS


@dataclass(frozen=True, slots=True)
class PagerChanged:
    """The pager of this host announced itself under ``epoch``."""

    epoch: int


@dataclass(frozen=True, slots=True)
class PagerLost:
    """The pager is silent: calls to it are spaced out until it is heard from again."""


@dataclass(frozen=True, slots=True)
class PoolMissing:
    """The pool that ``UsePool`` named cannot be mapped, or was unmapped because its pager had
    discarded it. The pager may have ended too. Rows are reported revoked until a pool is mapped."""

    pool_incarnation: int


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """That incarnation of a gateway is gone; nobody waits for its sequences."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class WorkerLost:
    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Accept no new work; sequences left after ``grace_ms`` fail with ``Gone``."""

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
    """Run ``plan`` and the rest of its run off the event loop. One ``StepsFinished`` or more must
    follow, the last without ``goes_on``. At most one plan runs at a time."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class EndRun:
    """Begin no further step of the run, whose plan is outdated. Harmless if the run has ended."""


@dataclass(frozen=True, slots=True)
class UsePool:
    """Map this pool, in place of any earlier one, before any later ``RunStep``. If it does not
    exist, ``PoolMissing`` follows, and until a pool is mapped all rows are reported revoked."""

    opened: SessionOpened


@dataclass(frozen=True, slots=True)
class Preempted:
    """The pager took a lease back. For the log (``preemptions``): the request, the tokens lost, the
    reason, and what the pager says about who uses the pool."""

    key: SequenceKey
    lost_tokens: int
    reason: str
    usage: str


@dataclass(frozen=True, slots=True)
class SequenceFacts:
    """What became of a sequence at this worker, for its span and the metrics."""

    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    computed_tokens: int
    preempted_count: int
    lost_tokens: int
    saved_pages: int
    """Pages saved because its beams or choices shared them, at the peak."""
    finish: Finish | None
    """None: it was handed over."""
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
