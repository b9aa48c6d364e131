"""A worker's metrics."""

from __future__ import annotations

from collections.abc import Sequence

from pagemesh.engine.worker.events import Preempted, SequenceFacts
from pagemesh.engine.worker.plan import StepPlan, StepResult
from pagemesh.runtime import metrics
from pagemesh.wire.presence import Load

_STEP_SECONDS_BUCKETS = (
    0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
_STEP_ROWS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

_step_seconds = metrics.histogram(
    "step_seconds", "Time of one forward pass, sampling included.", buckets=_STEP_SECONDS_BUCKETS
)
_step_rows = metrics.histogram(
    "step_rows",
    "Rows of one forward pass: one for each sequence, or for each beam of a search.",
    buckets=_STEP_ROWS_BUCKETS,
)
_computed = metrics.counter("computed_tokens_total", "Tokens whose K and V were computed.")
_cached = metrics.counter("cached_tokens_total", "Context tokens found in the prefix cache.")
_prompt = metrics.counter("prompt_tokens_total", "Prompt tokens of ended sequences.")
_drafted = metrics.counter("drafted_tokens_total", "Draft tokens computed.")
_accepted = metrics.counter("accepted_drafts_total", "Draft tokens accepted.")
_generated = metrics.counter("generated_tokens_total", "Tokens generated.")
_saved = metrics.counter(
    "saved_pages_total", "Pages saved because choices and beams of ended sequences shared them."
)
_revoked = metrics.counter("revoked_rows_total", "Rows discarded because their lease had ended.")
_preempted = metrics.counter("preemptions_total", "Leases taken back by the pager.", ("reason",))
_ended = metrics.counter("sequences_total", "Sequences that ended on this worker.", ("finish",))
_running = metrics.gauge("running_sequences", "Running sequences: with pages, being computed.")
_waiting = metrics.gauge("waiting_sequences", "Waiting sequences: accepted, without pages yet.")
_waiting_tokens = metrics.gauge("waiting_tokens", "Context tokens accepted but not computed yet.")

_REASONS = frozenset({"preempted", "session_expired", "ticket_expired", "stale", "revoked"})


def steps_ended(steps: Sequence[tuple[StepPlan, StepResult]]) -> None:
    """Forward passes have ended."""
    for plan, result in steps:
        # Revoked rows are left out: nothing was computed for them, or in vain.
        pairs = zip(plan.rows, result.rows, strict=True)
        rows = [row for row, outcome in pairs if not outcome.revoked]
        for step_us in result.took_us if rows else ():
            _step_seconds.observe(step_us / 1e6)
            _step_rows.observe(len(rows))
        accepted = sum(map(result.accepted_count, result.rows))
        _accepted.inc(accepted)
        _computed.inc(accepted + len(result.took_us) * sum(len(row.tokens) for row in rows))
        _drafted.inc(sum(row.drafted_count for row in result.rows))
        _revoked.inc(sum(row.revoked for row in result.rows))


def preempted(event: Preempted) -> None:
    """A lease was taken back."""
    _preempted.labels(event.reason if event.reason in _REASONS else "other").inc()


def sequence_ended(facts: SequenceFacts) -> None:
    """A sequence ended here, or was handed over."""
    _ended.labels(facts.finish or "handed").inc()
    _prompt.inc(facts.prompt_tokens)
    _cached.inc(facts.cached_tokens)
    _generated.inc(facts.generated_tokens)
    _saved.inc(facts.saved_pages)


def loaded(load: Load) -> None:
    """The scheduler's current load."""
    _running.set(load.running_count)
    _waiting.set(load.waiting_count)
    _waiting_tokens.set(load.waiting_tokens)
