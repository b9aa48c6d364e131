"""The report on a load: times as medians and tails, rates over the whole run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from pagemesh.cli.benching.client import Reply
from pagemesh.cli.benching.load import Outcome
from pagemesh.cli.words import counted

SHARES = (0.5, 0.9, 0.99)
_FAILURES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """The load: ``concurrency`` requests at once or ``rate`` a second; the other is None."""

    model: str
    url: str
    requests: int
    concurrency: int | None
    rate: float | None
    input_tokens: int
    shared_tokens: int
    output_tokens: int
    seed: int

    def __str__(self) -> str:
        manner = f"{self.concurrency} at once" if self.concurrency else f"{self.rate:g} a second"
        shared = f" ({self.shared_tokens:,} in common)" if self.shared_tokens else ""
        return (
            f"{self.model} at {self.url}: {counted(self.requests, 'request')}, {manner}, "
            f"{self.input_tokens:,} tokens in{shared}, {self.output_tokens:,} out, seed {self.seed}"
        )


def times_ms(replies: Iterable[Reply]) -> dict[str, list[float]]:
    """Sorted times in milliseconds, by kind. Only text can be timed: replies whose tokens form no
    whole character are left out."""
    timed = [reply for reply in replies if reply.arrivals_s]
    kinds: dict[str, Callable[[Reply], list[float]]] = {
        "first_text": lambda reply: [reply.first_s],
        "token": lambda reply: [reply.token_s] if reply.output_tokens > 1 else [],
        "between_chunks": lambda reply: reply.gaps_s,
        "answer": lambda reply: [reply.ended_s - reply.sent_s],
    }
    return {
        kind: sorted(1e3 * each_s for reply in timed for each_s in of(reply))
        for kind, of in kinds.items()
    }


def at_share(values: list[float], share: float) -> float:
    """The quantile ``share`` (0 to 1) of sorted ``values``, which must not be empty."""
    return values[round(share * (len(values) - 1))]


def rates(outcome: Outcome) -> dict[str, float]:
    """Rates per second, over the whole run."""
    out = sum(reply.output_tokens for reply in outcome.replies)
    both = out + sum(reply.prompt_tokens for reply in outcome.replies)
    counts = {"output_tokens": out, "all_tokens": both, "requests": len(outcome.replies)}
    return {kind: count / outcome.wall_s for kind, count in counts.items()}


def cached(outcome: Outcome) -> tuple[int, int] | None:
    """Cached tokens and all tokens of the prompts; None where the server does not say."""
    known = [reply for reply in outcome.replies if reply.cached_tokens is not None]
    if not known:
        return None
    return sum(reply.cached_tokens or 0 for reply in known), sum(one.prompt_tokens for one in known)


def text_report(asked: Asked, outcome: Outcome) -> str:
    titles = {
        "first_text": "first text, ms", "token": "a token after it, ms",
        "between_chunks": "between chunks, ms", "answer": "whole answer, ms",
    }  # fmt: skip
    lines = [str(asked)]
    times = {kind: found for kind, found in times_ms(outcome.replies).items() if found}
    if times:
        lines += ["", f"{'':20} {'median':>10} {'90%':>10} {'99%':>10}"]
    for kind, found in times.items():
        shown = " ".join(f"{at_share(found, share):10,.1f}" for share in SHARES)
        lines.append(f"{titles[kind]:20} {shown}")
    lines.append("")
    if outcome.replies:
        rate = rates(outcome)
        lines.append(
            f"{rate['output_tokens']:,.1f} tokens a second out, {rate['all_tokens']:,.1f} with "
            f"prompts; {rate['requests']:,.2f} requests a second; {outcome.wall_s:,.1f} s"
        )
    found_cached = cached(outcome)
    if found_cached is not None:
        lines.append(
            f"{found_cached[0]:,} of {found_cached[1]:,} prompt tokens came from the cache"
        )
    done = len(outcome.replies) + len(outcome.failures)
    if outcome.stopped:
        lines.append(f"stopped after {done} of {counted(asked.requests, 'request')}")
    if outcome.failures:
        lines.append(f"{len(outcome.failures)} of {counted(done, 'request')} failed:")
        for text, count in Counter(outcome.failures).most_common(_FAILURES_SHOWN):
            lines.append(f"  {counted(count, 'time')}: {text}")
    return "\n".join(lines)


def json_report(asked: Asked, outcome: Outcome) -> dict[str, Any]:
    found_cached = cached(outcome)
    return {
        "asked": asdict(asked),
        "answered": len(outcome.replies),
        "failures": dict(Counter(outcome.failures)),
        "stopped": outcome.stopped,
        "wall_s": outcome.wall_s,
        "a_second": rates(outcome),
        "ms": {
            kind: {f"p{100 * share:g}": at_share(found, share) for share in SHARES}
            for kind, found in times_ms(outcome.replies).items()
            if found
        },
        "cached_tokens": found_cached and found_cached[0],
        "prompt_tokens": found_cached and found_cached[1],
    }  # fmt: skip
