"""What the page about the cache says of eviction policies."""

from __future__ import annotations

import json
from pathlib import Path

from pagemesh.pager.eviction import POLICIES

OPS = Path(__file__).parents[3] / "ops"


def test_the_page_tells_of_every_policy_with_the_figures_that_are_kept() -> None:
    section = (OPS / "docs" / "cache.md").read_text().partition("## What goes first\n")[2]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.partition("\n## ")[0].splitlines()
        if line.startswith("|")
    ]
    kept = json.loads((OPS / "bench" / "results" / "eviction.json").read_text())
    titles, _, *rows = lines
    assert [row[0] for row in rows] == [f"`{name}`" for name in POLICIES]
    places = [kept["capacities"].index(int(title.replace(",", ""))) for title in titles[3:]]
    for name, row in zip(POLICIES, rows, strict=True):
        rates = [kept["hit_rates"][name][at] / kept["optimum"][at] for at in places]
        assert row[3:] == [f"{rate:.1%}" for rate in rates], name
