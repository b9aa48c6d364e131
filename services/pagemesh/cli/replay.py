"""``pagemesh replay``: the hit rate that a cache would have had on a trace, by size and policy."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from pagemesh.cli.param_types import Counts, Number
from pagemesh.cli.replaying.optimum import optimal_rate, unbounded_rate
from pagemesh.cli.replaying.pager import hit_rate
from pagemesh.cli.replaying.report import (
    Scores,
    check_plot,
    json_report,
    save_plot,
    text_report,
)
from pagemesh.cli.replaying.trace import Trace, read_trace
from pagemesh.pager.eviction import POLICIES

CAPACITIES = (1_000, 10_000, 30_000, 50_000, 100_000)
_CAPACITIES = Counts(2, 1 << 24, "block counts such as 1000,10000")


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--policy", "policies", multiple=True, type=click.Choice([*POLICIES, "all"]),
              help="Eviction policy; may be repeated.  [default: learned, lru]")  # fmt: skip
@click.option("--capacity", type=_CAPACITIES, default=CAPACITIES,
              help="Cache sizes, in blocks.  [default: 1000 to 100000]")  # fmt: skip
@click.option("--score-last", type=Number(0, 1, min_open=True), default=1.0,
              metavar="SHARE", help="Score only this last share of the requests; the others "
              "warm up the cache.")  # fmt: skip
@click.option("--cold", is_flag=True, help="Start scoring with an empty cache.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Plot to this file; the extension sets the format.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print every number as JSON.")
def replay(
    trace: Path,
    policies: tuple[str, ...],
    capacity: tuple[int, ...],
    score_last: float,
    cold: bool,
    plot: Path | None,
    as_json: bool,
) -> int:
    """Run the pager on TRACE and print its hit rates beside the optimum.

    Each line of TRACE is a JSON object with hash_ids, the ids of a prompt's blocks.
    """
    if plot is not None:
        check_plot(plot)
    read = read_trace(trace, score_last)
    played = read.without_warm_up() if cold else read
    names = tuple(POLICIES) if "all" in policies else policies or ("learned", "lru")
    scores = score(played, tuple(dict.fromkeys(names)), capacity)
    if as_json:
        click.echo(json.dumps(json_report(read, scores, cold=cold), indent=2))
    else:
        click.echo(text_report(read, scores, cold=cold))
    if plot is not None:
        save_plot(plot, read, scores)
    return 0


def score(trace: Trace, policies: tuple[str, ...], capacities: tuple[int, ...]) -> Scores:
    """Replay every policy at every capacity, with progress on stderr if that is a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        runs = (len(policies) + 1) * len(capacities)
        task = progress.add_task("replaying", total=runs * len(trace.prompts))
        rates = {
            policy: tuple(
                hit_rate(trace, capacity, policy, lambda count: progress.advance(task, count))
                for capacity in capacities
            )
            for policy in policies
        }
        optimum = []
        for capacity in capacities:
            optimum.append(optimal_rate(trace, capacity))
            progress.advance(task, len(trace.prompts))
    return Scores(capacities, rates, tuple(optimum), unbounded_rate(trace))
