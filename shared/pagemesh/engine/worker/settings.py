"""What a worker is told once, at its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pagemesh.runtime.service_config import BEAT_LATE_MS_MAX
from pagemesh.wire.pager_messages import PoolSpec


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Who this worker is. ``incarnation`` is new with every start of the process."""

    name: str
    incarnation: int
    lock_name: str
    """The file in the pool folder that the process keeps locked for as long as it lives."""
    pool: PoolSpec
    model_root: bytes
    """Of what it serves: the pages of no other are read or written here."""
    model: str = ""
    """What it serves, as clients call it."""


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """Where the two roles differ."""

    role: Literal["prefill", "decode"]
    hand_over: bool
    """Give a sequence to the decode worker that its ``Submit`` names, after the first token."""
    step_tokens_max: int
    """Prompt tokens computed in one step, over all rows."""
    chunk_tokens_max: int
    """Tokens of one sequence computed in one step; both but for little rests (``batching``)."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Every bound of the core. Times are in milliseconds."""

    context_tokens_max: int = 1 << 20
    sequences_max: int = 256
    """Sequences accepted and not ended, over all phases."""
    waiting_tokens_max: int = 1 << 21
    """Context tokens accepted and not computed yet."""
    step_rows_max: int = 256
    itl_target_ms: int = 0
    """The longest a step with prompts should take while somebody draws; 0: see ``batching``."""
    stream_ms: int = 0
    """Tokens are sent at most this often, so that prompts beside them may take as long."""
    growth_pages: int = 2
    """Pages asked for ahead of need, at admission and while decoding."""
    prompt_chunks: int = 2
    """Of a prompt's chunks (``chunk_tokens_max``), those that it has pages for at admission, and
    more at a time; the others are promised. 0: it has all of its pages from the start."""
    commit_pages: int = 4
    """Full pages that a decoding sequence gathers before it commits them."""
    ticket_ttl_ms: int = 10_000
    attach_tries_max: int = 3
    call_ms: int = 2_000
    """How long a call waits for its answer."""
    expect_ms: int = 250
    """How long an answer is waited for that somebody else has asked for in our name."""
    pager_away_ms: int = 10_000
    """Without a pager for so long it takes nothing new; one started again is there sooner."""
    pager_wait_ms_max: int = 30_000
    """What cannot go on without a pager that is away for so long is given back to its gateway."""
    beat_late_ms_max: int = BEAT_LATE_MS_MAX
    """A heartbeat waits so long for a moment in which no lease changes hands."""
    retry_ms: int = 20
    retry_ms_max: int = 1_000
    deadline_ms_min: int = 1
    """A message with less time left is refused."""
    retain_ms: int = 10_000
    """How long an ended sequence can still be sent again."""
    retained_max: int = 1_024
    beat_ms: int = 200
    """Silence after which a gateway hears the last counter again."""
    beats_max: int = 10
    """Such repeats after the last sequence of a gateway ended."""
    gateways_max: int = 1_024
    """Lives of gateways remembered, beside those with a sequence here."""
    workers_max: int = 1_024
    """Lost workers remembered."""
    resend_tokens_max: int = 4_096
    """Tokens sent again in one frame; a gateway asks on from there."""
    aborts_max: int = 4_096
    """Aborted requests remembered, so that a message that comes late is refused."""
    abort_ms: int = 60_000
    declare_bytes_max: int = 1 << 17
    """Of leases that are declared in one part: the pager takes a few milliseconds for it."""
    frames_bytes_max: int = 1 << 19
    """Of the frames in one message; one that is larger has a message for itself."""
    tick_ms: int = 20
    """Between ticks while anything waits for time to pass; see ``WorkerCore.patience_ms``."""
    calm_tick_ms: int = 100
    """While all that there is goes on by itself."""
    idle_tick_ms: int = 500
    run_steps_max: int = 32
    """Tokens that a sequence draws in a row without asking the scheduler."""
