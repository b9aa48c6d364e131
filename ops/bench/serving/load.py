"""One round of a workload against one server, and its figures."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import asdict, dataclass

from ops.bench.serving import workloads
from ops.bench.serving.workloads import Prompt, Word, Workload

from pagemesh.cli.benching.client import Reply, RequestFailedError, Server, complete

WARM_UP_TOKENS, WARM_UP_OUTPUT_TOKENS = 32, 8


@dataclass(frozen=True, slots=True)
class Round:
    """Figures of one round. ``first_ms``: time to the first text, median over requests; ``gap_ms``:
    time between chunks with text (of one or several tokens), median over gaps; ``token_ms``: time
    per token after the first, median over requests. ``gap_p99_ms``: the 99th percentile of the
    gaps."""

    output_tokens_s: float
    first_ms: float
    gap_ms: float
    gap_p99_ms: float
    token_ms: float
    wall_s: float
    cached_tokens: int | None

    def as_json(self) -> dict[str, float | int | None]:
        return {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


async def run_round(server: Server, workload: Workload, words: list[Word], seed: str) -> Round:
    """Run ``ask_everyone``; returns its figures. Raises ``RequestFailedError``."""
    return summary(*await ask_everyone(server, workload, words, seed))


async def ask_everyone(
    server: Server, workload: Workload, words: list[Word], seed: str
) -> tuple[list[Reply], float]:
    """Send an uncounted small request, then those of all users; returns the replies, user by user,
    and the seconds until the last. Raises ``RequestFailedError``."""
    warm_up = Workload(1, 1, 0, WARM_UP_TOKENS, 0, WARM_UP_OUTPUT_TOKENS, 1.0)
    await _ask(server, warm_up, workloads.prompts(warm_up, words, f"warm-up {seed}")[0])
    everyone = workloads.prompts(workload, words, seed)
    started_s = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            users = [group.create_task(_ask(server, workload, said)) for said in everyone]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    wall_s = time.perf_counter() - started_s
    return [reply for user in users for reply in user.result()], wall_s


async def _ask(server: Server, workload: Workload, said: list[Prompt]) -> list[Reply]:
    """Send one user's prompts. A conversation continues with the returned text, as a client's
    would."""
    replies: list[Reply] = []
    talk = ""
    for prompt in said:
        if workload.is_talk:
            talk += workloads.text(prompt)
        as_text = server.plain or workload.is_talk
        asked = (talk or workloads.text(prompt)) if as_text else workloads.ids(prompt)
        replies.append(await complete(server, asked, workload.output_tokens))
        if workload.is_talk:
            talk += replies[-1].text
    return replies


def summary(replies: list[Reply], wall_s: float) -> Round:
    """The figures of ``replies``, which took ``wall_s`` seconds together. A reply whose tokens form
    no whole character has no times, but its tokens count. Raises ``RequestFailedError`` if no reply
    has times."""
    timed = [reply for reply in replies if reply.arrivals_s]
    if not timed:
        raise RequestFailedError("no text came back, so that nothing can be timed")
    gaps_s = [gap for reply in replies for gap in reply.gaps_s]
    known = [reply.cached_tokens for reply in replies if reply.cached_tokens is not None]
    return Round(
        output_tokens_s=sum(reply.output_tokens for reply in replies) / wall_s,
        first_ms=1e3 * statistics.median(reply.first_s for reply in timed),
        gap_ms=1e3 * statistics.median(gaps_s) if gaps_s else 0.0,
        gap_p99_ms=1e3 * sorted(gaps_s)[round(0.99 * (len(gaps_s) - 1))] if gaps_s else 0.0,
        token_ms=1e3 * statistics.median(reply.token_s for reply in timed),
        wall_s=wall_s,
        cached_tokens=sum(known) if known else None,
    )
