"""One death, or one long sleep, at one message: for every kind of message that processes handle,
right before and right after it, and for every process of a mesh.

``python -m tests.sim.deaths`` tries them all, each with ``--seeds`` seeds.
"""

from __future__ import annotations

import itertools
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import click
from tests.sim import model
from tests.sim.bugs import NONE, Bugs
from tests.sim.clients import Clients
from tests.sim.mesh import PAGER_LIMITS, Mesh, Shape
from tests.sim.run import Breakage
from tests.sim.scenario import Outcome, play_out
from tests.sim.world import Act, Process, World

from pagemesh.wire.messages import Message

KINDS = (
    "Submit", "Admit", "Granted", "Extend", "Extended", "Fork", "Forked", "Commit", "Committed",
    "Offer", "Offered", "Attach", "Accepted", "Redeem", "TicketClosed", "Frames", "Release",
    "Withdraw", "CancelTicket", "Revoke", "AckRevoke", "Resend", "Abort",
    "OpenSession", "SessionOpened", "Declare", "Declared", "Heartbeat", "Queued",
)  # fmt: skip
"""The messages between workers of both roles, the pager and a gateway, from a request's first to
its last, and those after one of them was away."""
Victim = Literal["prefill", "decode", "pager", "gateway"]
VICTIMS: tuple[Victim, ...] = ("prefill", "decode", "pager", "gateway")
ASLEEP_MS = 1.4 * PAGER_LIMITS.session_ttl_ms
"""Longer than sessions and tickets live."""
_CALM_MS = 6_000.0
_AT_MS_MAX = 600.0


@dataclass(frozen=True, slots=True)
class Death:
    """The death of ``victim`` when the ``count``-th message of ``kind`` is handled."""

    kind: str
    after: bool
    victim: Victim
    sleeps: bool
    """The victim does not die, but freezes for ``ASLEEP_MS``."""
    count: int = 1

    def __str__(self) -> str:
        what = "sleeps" if self.sleeps else "dies"
        when = "after" if self.after else "before"
        return f"{self.victim} {what} {when} {self.kind} {self.count}"


PROVOKED = {
    "Withdraw": Death("Attach", False, "decode", sleeps=False),
    "Resend": Death("Redeem", False, "decode", sleeps=True),
    "CancelTicket": Death("Redeem", False, "pager", sleeps=True),
    "Revoke": Death("Commit", False, "prefill", sleeps=True),
    "AckRevoke": Death("Commit", False, "prefill", sleeps=True),
    "Abort": Death("Redeem", False, "decode", sleeps=False),
    "Declare": Death("Offered", True, "pager", sleeps=False),
    "Declared": Death("Offered", True, "pager", sleeps=False),
}
"""Deaths that cause messages which are never sent otherwise."""


def all_deaths(count: int = 1) -> Iterator[Death]:
    """All deaths at the ``count``-th message of each kind."""
    for kind, after, victim, sleeps in itertools.product(
        KINDS, (False, True), VICTIMS, (False, True)
    ):
        yield Death(kind, after, victim, sleeps, count)


class Reaper:
    """Watches the messages, and kills when the one of a death is handled."""

    def __init__(self, world: World, mesh: Mesh, deaths: list[Death]) -> None:
        self._world, self._mesh = world, mesh
        self._open = deaths
        self._seen = 0

    @property
    def done(self) -> bool:
        return not self._open

    def __call__(self, process: Process, message: Message, act: Act) -> None:
        if self.done or type(message).__name__ != self._open[0].kind:
            act()
            return
        self._seen += 1
        if self._seen < self._open[0].count:
            act()
            return
        death, self._seen = self._open.pop(0), 0
        self._world.note("fault", str(death), process.name)
        if death.after:
            act()
            self._strike(death)
        else:
            self._strike(death)
            process.at(0.0, act)  # if it lives, once it is awake

    def _strike(self, death: Death) -> None:
        mesh = self._mesh
        victim: Process = {
            "prefill": mesh.workers[0],
            "decode": mesh.workers[1],
            "pager": mesh.pagers[0],
            "gateway": mesh.gateways[0],
        }[death.victim]
        if death.sleeps:
            victim.freeze()
            self._world.at(ASLEEP_MS, victim.thaw)
        else:
            mesh.restart(victim)


def play_death(
    death: Death, seed: int, bugs: Bugs = NONE, world: World | None = None
) -> Outcome | None:
    """Play one death. None: there was no such message. Raises ``AssertionError`` when an invariant
    breaks."""
    world = world or World(seed)
    dice = world.random
    is_tight = death.kind in ("Revoke", "AckRevoke", "Queued") or dice.random() < 0.3
    shape = Shape(
        hosts_count=1, prefill_count=1, decode_count=1, gateway_count=1,
        page_count=28 if is_tight else 120, page_size=4, step_tokens_max=32, chunk_tokens_max=16,
        step_ms=4.0,
    )  # fmt: skip
    mesh = Mesh.build(world, shape, bugs)
    clients = Clients(world, mesh)
    before = [PROVOKED[death.kind]] if death.kind in PROVOKED else []
    reaper = Reaper(world, mesh, [*before, death])
    mesh.network.witness = reaper
    stem = tuple(dice.randrange(model.VOCAB_TOKENS) for _ in range(17))
    for number in range(5):
        root, own = clients.fresh(dice)
        at_ms = 250.0 + (40.0 if is_tight else _AT_MS_MAX) * dice.random()
        for again_ms in (0.0, _CALM_MS):  # later requests read what was left
            clients.ask(root, stem + own if number % 2 else own, at_ms + again_ms)
    outcome = play_out(world, mesh, clients, _CALM_MS + _AT_MS_MAX)
    return outcome if reaper.done else None


def meet(
    death: Death, *, seeds: int, start: int = 0, trace_lines: int = 60
) -> Outcome | Breakage | None:
    """The result of ``death`` with the first of ``seeds`` seeds that has such a message; None if
    none has."""
    for seed in range(start, start + seeds):
        world = World(seed)
        try:
            outcome = play_death(death, seed, world=world)
        except Exception as error:
            what = "".join(traceback.format_exception(error, limit=-6))
            return Breakage(seed, what, world.trace(trace_lines))
        if outcome is not None:
            return outcome
    return None


@click.command()
@click.option("--seeds", default=3, show_default=True, help="How many for each death.")
@click.option("--count", default=1, show_default=True, help="At the first such message, or which.")
@click.option("--start", default=0, show_default=True, help="The first seed.")
def main(seeds: int, count: int, start: int) -> None:
    """Try every death with every seed."""
    began, met, answers, broken = time.monotonic(), 0, 0, 0
    for death in all_deaths(count):
        for seed in range(start, start + seeds):
            result = meet(death, seeds=1, start=seed)
            if isinstance(result, Breakage):
                broken += 1
                click.echo("\n".join(result.trace) if broken == 1 else "")
                click.echo(f"{death}, seed {seed}:\n{result.what}")
            elif result is not None:
                met, answers = met + 1, answers + result.completed_count
    took_s = time.monotonic() - began
    click.echo(f"{met} deaths, {answers} answers, {broken} broken, {took_s:.0f} s")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
