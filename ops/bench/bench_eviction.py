"""How much of what could be hit does each eviction policy hit, on a public trace?

    python -m ops.bench.bench_eviction TRACE [--cold] [--out ops/bench/results/eviction.json]

What ``pagemesh replay`` prints, for every policy (``--cold``: for the default and LRU), with the
commit and the machine. The second half of the trace is scored: from the cache that the first has
left, or ``--cold`` from an empty one. It is no trace that the default has not seen: what it is made
of was chosen by the first half's hit rates while the second half's were looked at, too. Wanted: it
hits more than LRU from 1,000 to 50,000 blocks, and no less at 100,000.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ops.bench.hardware import describe

from pagemesh.cli.replay import CAPACITIES, score
from pagemesh.cli.replaying.report import Scores, json_report, text_report
from pagemesh.cli.replaying.trace import read_trace
from pagemesh.pager.eviction import POLICIES

SCORED_SHARE = 0.5
NO_LESS_FROM = 100_000
"""From so many blocks on a cache holds almost all that is asked for again."""
DEFAULT, OTHER = next(iter(POLICIES)), "lru"


def main() -> None:
    """Play, print, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.trace is None:
        print("no trace is named: nothing is played")
        return
    trace = read_trace(options.trace, SCORED_SHARE)
    policies = (DEFAULT, OTHER) if options.cold else tuple(POLICIES)
    played = trace.without_warm_up() if options.cold else trace
    scores = score(played, policies, CAPACITIES)
    print(text_report(trace, scores, cold=options.cold))
    aims = met(scores)
    for line in aims:
        print(
            f"{line['blocks']:>7,} blocks: {line['more_hits']:+.4f} beside {OTHER}, "
            f"{line['of_optimum']:.1%} of the optimum{'' if line['met'] else ' (missed)'}"
        )
    if options.out is not None:
        report = {"on": describe(), "aims": aims, **json_report(trace, scores, cold=options.cold)}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def met(scores: Scores) -> list[dict[str, float | int | bool]]:
    """By capacity: how much more the default hits than LRU (share of the blocks), how much of
    the optimum that is, and whether it is what is wanted."""
    lines: list[dict[str, float | int | bool]] = []
    columns = zip(
        scores.capacities, scores.rates[DEFAULT], scores.rates[OTHER], scores.optimum, strict=True
    )
    for blocks, ours, theirs, best in columns:
        wanted = ours >= theirs if blocks >= NO_LESS_FROM else ours > theirs
        lines.append(
            {
                "blocks": blocks, "more_hits": ours - theirs,
                "of_optimum": ours / best if best else 1.0, "met": wanted,
            }
        )  # fmt: skip
    return lines


if __name__ == "__main__":
    main()
