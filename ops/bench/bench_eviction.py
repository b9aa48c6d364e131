"""How close to the optimal hit rate does each eviction policy come, on a public trace?

    python -m ops.bench.bench_eviction TRACE [--cold] [--out ops/bench/results/eviction.json]

Writes what ``pagemesh replay`` prints, for every policy (``--cold``: for the default and LRU), with
commit and machine. The second half of the trace is scored, starting from the cache that the first
half left, or with ``--cold`` from an empty one. The default policy has been tuned on this trace:
its parts were chosen by the hit rates of the first half, while those of the second were looked at,
too. The aim: it hits more than LRU with 1,000 to 50,000 blocks, and no less with 100,000.
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
"""A cache of this many blocks holds almost everything that is requested again, so here the default
need not be better than LRU."""
DEFAULT, OTHER = next(iter(POLICIES)), "lru"


def main() -> None:
    """Replay the trace, print the figures, and write them to ``--out``."""
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
    """By capacity: how much more the default hits than LRU (as a share of the blocks), its share of
    the optimum, and whether the aim is met."""
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
