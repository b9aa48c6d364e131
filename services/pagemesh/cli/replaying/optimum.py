"""The highest hit rate that a cache of a given size can reach if it knows all future requests.

Belady's rule with bypass: of the cached blocks and the one just used, evict the one whose next use
is farthest away; a block that is never used again is not kept. As all blocks have one size, no
cache hits more.

This is optimal for prefix caches too, where a block is useful only with all blocks before it: a
request uses those first, so their next use is never later, and the rule drops no block before those
that follow it. It is an upper bound rather than a goal: it reserves no room for the prompt being
served, of which a pager must hold every block at once.
"""

from __future__ import annotations

import heapq

from pagemesh.cli.replaying.trace import Trace


def optimal_rate(trace: Trace, page_count: int) -> float:
    """The hit rate on the scored blocks that no cache of ``page_count`` blocks exceeds. That cache
    may keep anything from the warm-up requests, and knows which blocks are scored."""
    accesses = [block for prompt in trace.prompts for block in prompt]
    first = len(accesses) - trace.scored_blocks
    cached: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    hits = 0
    for at, (block, next_use) in enumerate(zip(accesses, _next_uses(accesses, first), strict=True)):
        if cached.pop(block, None) is not None and at >= first:
            hits += 1
        if next_use == len(accesses):
            continue
        cached[block] = next_use
        heapq.heappush(farthest, (-next_use, block))
        while len(cached) > page_count:
            negative, candidate = heapq.heappop(farthest)
            if cached.get(candidate) == -negative:  # otherwise the entry is out of date
                del cached[candidate]
    return hits / trace.scored_blocks


def unbounded_rate(trace: Trace) -> float:
    """The hit rate of a cache that keeps everything."""
    seen: set[int] = set()
    hits = 0
    for number, prompt in enumerate(trace.prompts):
        if number >= trace.scored_from:
            hits += sum(block in seen for block in prompt)
        seen.update(prompt)
    return hits / trace.scored_blocks


def _next_uses(accesses: list[int], first: int) -> list[int]:
    """For each access, the index of the next scored one (``first`` or later) to the same block;
    ``len(accesses)`` if there is none."""
    found = [len(accesses)] * len(accesses)
    upcoming: dict[int, int] = {}
    for at in range(len(accesses) - 1, -1, -1):
        found[at] = upcoming.get(accesses[at], len(accesses))
        if at >= first:
            upcoming[accesses[at]] = at
    return found
