"""Settings of a worker's core, fixed at its start."""

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
    """Digest of the model that it serves; pages of other models are neither read nor written."""
    model: str = ""
    """The name that clients use for the model."""


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """Settings in which the two roles differ."""

    role: Literal["prefill", "decode"]
    hand_over: bool
    """After its first token, hand a sequence over to the decode worker its ``Submit`` names."""
    step_tokens_max: int
    """Prompt tokens computed in one step, over all rows."""
    chunk_tokens_max: int
    """Prompt tokens of one sequence computed in one step. A small rest of a prompt may exceed
    either limit (``batching``)."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Every bound of the core. Times are in milliseconds."""

    context_tokens_max: int = 1 << 20
    sequences_max: int = 256
    """Sequences accepted and not ended, in any phase."""
    waiting_tokens_max: int = 1 << 21
    """Context tokens accepted and not computed yet."""
    step_rows_max: int = 256
    itl_target_ms: int = 0
    """The longest a step with prompts should take while others decode; 0: see ``batching``."""
    stream_ms: int = 0
    """Least time between two reports of tokens; prompts beside them may take as long."""
    growth_pages: int = 2
    """Pages asked for ahead of need, at admission and while decoding."""
    prompt_chunks: int = 2
    """Chunks (of ``chunk_tokens_max``) that a prompt gets pages for at admission, and then at a
    time; pages for the others are promised. 0: a prompt gets all of its pages at admission."""
    commit_pages: int = 4
    """Full pages that a decoding sequence gathers before it commits them."""
    ticket_ttl_ms: int = 10_000
    attach_tries_max: int = 3
    call_ms: int = 2_000
    """How long a call waits for its answer."""
    expect_ms: int = 250
    """How long to wait for the answer to an ``Admit`` that a gateway sent in our name."""
    pager_away_ms: int = 10_000
    """After this long without a pager it is not ready for new work. A pager restarts faster."""
    pager_wait_ms_max: int = 30_000
    """After this long without a pager, sequences that cannot go on without one fail with ``Busy``,
    so that their gateways can try elsewhere."""
    beat_late_ms_max: int = BEAT_LATE_MS_MAX
    """How long a heartbeat may wait for a moment in which no call is open that moves a lease."""
    retry_ms: int = 20
    retry_ms_max: int = 1_000
    deadline_ms_min: int = 1
    """A message with less time left is refused."""
    retain_ms: int = 10_000
    """How long the tokens of an ended sequence can be resent."""
    retained_max: int = 1_024
    beat_ms: int = 200
    """After this long without a message, a gateway is sent the last counter again."""
    beats_max: int = 10
    """Such repeats after a gateway's last sequence has ended."""
    gateways_max: int = 1_024
    """Gateway incarnations remembered; those with a sequence here always are."""
    workers_max: int = 1_024
    """Lost workers remembered."""
    resend_tokens_max: int = 4_096
    """Tokens resent at a time; the gateway then asks for the next ones."""
    aborts_max: int = 4_096
    """Aborted requests remembered, so that messages of theirs that come late are refused."""
    abort_ms: int = 60_000
    declare_bytes_max: int = 1 << 17
    """Size of one part of a declaration of leases; the pager takes a few milliseconds for it."""
    frames_bytes_max: int = 1 << 19
    """Size of the frames in one message; a larger frame gets a message of its own."""
    tick_ms: int = 20
    """Time between ticks while something waits for a retry; see ``WorkerCore.patience_ms``."""
    calm_tick_ms: int = 100
    """Time between ticks while there are sequences, all of which run."""
    idle_tick_ms: int = 500
    run_steps_max: int = 32
    """Tokens that a sequence may draw in one run, without asking the scheduler."""
