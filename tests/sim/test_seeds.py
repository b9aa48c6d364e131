"""The whole mesh survives what goes wrong, seed after seed.

``PAGEMESH_LONG=1`` runs a thousand seeds instead of the few that every test run affords;
``python -m tests.sim.run`` runs any, and prints the trace of the first that breaks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.sim.run import Breakage, PlayAll, play, players

_BLOCK_SEEDS = 20
_SEEDS = 1_000 if os.environ.get("PAGEMESH_LONG") == "1" else 120


@pytest.fixture(scope="module")
def play_all() -> Iterator[PlayAll]:
    with players(min(2, os.cpu_count() or 1)) as made:
        yield made


@pytest.mark.parametrize("first", range(0, _SEEDS, _BLOCK_SEEDS))
def test_every_seed_delivers_each_token_once_and_gives_every_page_back(
    play_all: PlayAll, first: int
) -> None:
    saved_count = loaded_count = invalidated_count = 0
    seeds = range(first, first + _BLOCK_SEEDS)
    for seed, result in zip(seeds, play_all(seeds), strict=True):
        if isinstance(result, Breakage):
            pytest.fail(f"seed {seed}\n" + "\n".join(result.trace) + f"\n{result.what}")
        assert result.completed_count or result.orphaned_count or result.cancelled_count
        saved_count += result.saved_count
        loaded_count += result.loaded_count
        invalidated_count += result.invalidated_count
    assert saved_count, "crowds came, and nobody waited for what another computed"
    assert loaded_count, "pages were evicted, and none came back from disk"
    assert invalidated_count, "no operator invalidated anything"


def test_a_seed_always_gives_the_same_run() -> None:
    assert play(11) == play(11)
