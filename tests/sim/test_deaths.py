"""Whoever dies, or stands still for too long, right before or right after whatever message.

``python -m tests.sim.deaths`` tries more seeds, and other messages than the first of a kind.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from functools import partial
from multiprocessing.pool import Pool

import pytest
from tests.sim.deaths import KINDS, Death, all_deaths, meet
from tests.sim.run import Breakage

_SEEDS_MAX = 4
"""Tried for each, until such a message is sent at all."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with multiprocessing.get_context("spawn").Pool(min(2, os.cpu_count() or 1)) as made:
        yield made


@pytest.mark.parametrize("kind", KINDS)
def test_a_death_at_a_message_changes_no_token_and_strands_no_page(pool: Pool, kind: str) -> None:
    deaths = [death for death in all_deaths() if death.kind == kind]
    for death, result in zip(
        deaths, pool.imap(partial(meet, seeds=_SEEDS_MAX), deaths), strict=True
    ):
        if isinstance(result, Breakage):
            pytest.fail(f"{death}, seed {result.seed}\n" + "\n".join(result.trace) + result.what)
        assert result is not None, f"nobody sent {death.kind}"


def test_a_death_comes_at_its_message() -> None:
    result = meet(Death("Offer", True, "decode", sleeps=False), seeds=1)
    assert result is not None and not isinstance(result, Breakage)
    assert result.completed_count > 0
