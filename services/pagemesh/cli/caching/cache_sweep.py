"""Waits for pagers that free invalidated pages in parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from pagemesh.cli.operator import Mesh
from pagemesh.cli.words import counted
from pagemesh.wire.cache_messages import AskCacheStats, CacheInvalidated, CacheStats
from pagemesh.wire.errors import Fault

_LOOK_S, _LOOKS_MAX = 0.5, 1_200

Answers = list[tuple[str, Any]]
"""Pairs of host and its answer."""


async def wait_until_swept(
    mesh: Mesh, answers: Answers, say: Callable[[str], None], *, look_s: float = _LOOK_S
) -> Answers:
    """``answers``, updated until each pager is done. ``goes_on`` remains set for a pager that stops
    answering or is not done after ten minutes. ``say`` gets lines about the progress."""
    done = dict(answers)
    silent: set[str] = set()
    for _ in range(_LOOKS_MAX):
        waits = [
            (host, one)
            for host, one in done.items()
            if host not in silent and isinstance(one, CacheInvalidated) and one.goes_on
        ]
        if not waits:
            break
        await asyncio.sleep(look_s)
        looks = await mesh.ask("stats", AskCacheStats(), CacheStats)
        for host, answer in waits:
            stats = looks.get(host)
            if stats is None or isinstance(stats, Fault):
                silent.add(host)
                continue
            freed = max(answer.freed_pages, stats.swept_pages)
            done[host] = replace(answer, freed_pages=freed, goes_on=stats.is_sweeping)
            if stats.is_sweeping:
                say(f"{host}: {counted(freed, 'page')} freed so far")
    return list(done.items())
