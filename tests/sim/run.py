"""Many seeds: ``python -m tests.sim.run --seeds 1000 --start 0``.

Prints progress, then totals. At the first seed that breaks an invariant it prints the seed, the
failure and the end of the trace, and exits with 1.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import click
from tests.sim.bugs import NONE, Bugs
from tests.sim.scenario import Outcome, run
from tests.sim.world import World


@dataclass(frozen=True, slots=True)
class Breakage:
    """A seed that broke an invariant."""

    seed: int
    what: str
    trace: list[str]


PlayAll = Callable[[Iterable[int]], Iterator[Outcome | Breakage]]


def play(
    seed: int, bugs: Bugs = NONE, *, trace_lines: int = 60, on_device: bool = False
) -> Outcome | Breakage:
    """Run one seed; a broken invariant, or any other exception, is a ``Breakage``."""
    world = World(seed)
    try:
        return run(seed, bugs, world=world, on_device=on_device)
    except Exception as error:
        what = "".join(traceback.format_exception(error, limit=-6))
        return Breakage(seed, what, world.trace(trace_lines))


def first_breakage(seeds: Iterable[int], bugs: Bugs, *, on_device: bool = False) -> Breakage | None:
    """The first of ``seeds`` that breaks."""
    for seed in seeds:
        result = play(seed, bugs, on_device=on_device)
        if isinstance(result, Breakage):
            return result
    return None


@click.command()
@click.option("--seeds", default=100, show_default=True, help="How many seeds to run.")
@click.option("--start", default=0, show_default=True, help="The first seed.")
@click.option("--trace", "trace_lines", default=60, show_default=True, help="Trace lines shown.")
@click.option("--jobs", default=1, show_default=True, help="Processes to share the seeds.")
@click.option("--keep-going", is_flag=True, help="Do not stop at the first breakage.")
def main(seeds: int, start: int, trace_lines: int, jobs: int, keep_going: bool) -> None:
    """Run the simulator for many seeds."""
    began = time.monotonic()
    outcomes: list[Outcome] = []
    broken: list[Breakage] = []
    with players(jobs, trace_lines=trace_lines) as play_all:
        for number, result in enumerate(play_all(range(start, start + seeds)), 1):
            if isinstance(result, Breakage):
                broken.append(result)
                _show(result)
                if not keep_going:
                    sys.exit(1)
            else:
                outcomes.append(result)
            if number % 50 == 0 or number == seeds:
                rate = number / (time.monotonic() - began)
                click.echo(f"{number}/{seeds} seeds, {rate:.1f} a second, {len(broken)} broken")
    _totals(outcomes)
    sys.exit(1 if broken else 0)


@contextmanager
def players(jobs: int, *, trace_lines: int = 60) -> Iterator[PlayAll]:
    """A function that plays seeds in ``jobs`` processes, with results in the order of the
    seeds."""
    one = partial(play, trace_lines=trace_lines)
    if jobs == 1:
        yield partial(map, one)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:  # callers may have threads
        yield partial(pool.imap, one)


def _show(breakage: Breakage) -> None:
    click.echo("\n".join(breakage.trace))
    click.echo(f"seed {breakage.seed} breaks:\n{breakage.what}")


def _totals(outcomes: list[Outcome]) -> None:
    def total(name: str) -> int:
        return sum(int(getattr(outcome, name)) for outcome in outcomes)

    names = ["events", "completed", "failed", "cancelled", "orphaned", "attempts", "preempted"]
    names += ["tokens", "saved", "loaded", "invalidated"]
    click.echo(", ".join(f"{name} {total(name + '_count')}" for name in names))
    reasons: dict[str, int] = {}
    for outcome in outcomes:
        for failure in outcome.failures:
            reason = " ".join(failure.split()[1:6])
            reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1])[:8]:
        click.echo(f"  failed {count}: {reason}")


if __name__ == "__main__":
    main()
