"""A command that waits until pagers have freed what was invalidated."""

from __future__ import annotations

from typing import Any, cast

from msgspec.structs import replace
from tests.unit.cli.test_cache_tables import RETIRED, STATS

from pagemesh.cli.caching.cache_sweep import wait_until_swept
from pagemesh.cli.operator import Mesh
from pagemesh.wire.cache_messages import CacheStats
from pagemesh.wire.errors import Absent, Fault

GOES_ON = replace(RETIRED, goes_on=True)


class Pagers:
    """What they say, one look after another."""

    def __init__(self, *looks: dict[str, CacheStats | Fault]) -> None:
        self.looks = list(looks)

    async def ask(self, *_: Any) -> dict[str, CacheStats | Fault]:
        return self.looks.pop(0)


async def waited(pagers: Pagers, answers: list[tuple[str, Any]]) -> tuple[Any, list[str]]:
    said: list[str] = []
    return await wait_until_swept(cast(Mesh, pagers), answers, said.append, look_s=0), said


async def test_it_is_told_how_far_each_host_is_and_then_how_much_it_was() -> None:
    busy, done = (
        replace(STATS, is_sweeping=on, swept_pages=n) for on, n in ((True, 20), (False, 90))
    )
    pagers = Pagers({"a": busy, "b": done}, {"a": done, "b": done})
    answers, said = await waited(pagers, [("a", GOES_ON), ("b", GOES_ON), ("c", RETIRED)])
    assert [(host, one.freed_pages, one.goes_on) for host, one in answers] == [
        ("a", 90, False), ("b", 90, False), ("c", 7, False),
    ]  # fmt: skip
    assert said == ["a: 20 pages freed so far"]


async def test_nobody_is_asked_where_all_was_done_at_once() -> None:
    fault = Absent("away")
    assert await waited(Pagers(), [("a", RETIRED), ("b", fault)]) == (
        [("a", RETIRED), ("b", fault)], [],
    )  # fmt: skip


async def test_a_pager_that_goes_away_is_not_waited_for() -> None:
    [answer], _ = await waited(Pagers({"a": Absent("away")}), [("a", GOES_ON)])
    assert answer == ("a", GOES_ON)


async def test_the_others_are_waited_for_when_one_pager_goes_away() -> None:
    done = replace(STATS, is_sweeping=False, swept_pages=90)
    busy, away = replace(done, is_sweeping=True), Absent("away")
    pagers = Pagers({"a": away, "b": busy}, {"b": done})
    answers, _ = await waited(pagers, [("a", GOES_ON), ("b", GOES_ON)])
    assert answers == [("a", GOES_ON), ("b", replace(GOES_ON, freed_pages=90, goes_on=False))]


async def test_what_was_freed_at_once_counts_though_a_pager_has_started_anew_since() -> None:
    anew = replace(STATS, is_sweeping=False, swept_pages=0)
    [(_, answer)], _ = await waited(Pagers({"a": anew}), [("a", GOES_ON)])
    assert (answer.freed_pages, answer.goes_on) == (7, False)
