"""What operators do during a run, at the door of each pager: pin, unpin and invalidate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Literal

from tests.sim import model
from tests.sim.clients import STORM_MS, Clients
from tests.sim.growths import MODEL, tenant_of
from tests.sim.mesh import Mesh
from tests.sim.pager_node import PagerNode
from tests.sim.world import World

from pagemesh.pager.events import Asked
from pagemesh.pager.tiers.tier_events import PutAway
from pagemesh.wire.cache_messages import InvalidateCache, PinPrefix, UnpinPrefix
from pagemesh.wire.messages import Message
from pagemesh.wire.pager_messages import Declare

_WORK_MS = 4.0
"""Roughly how long the work of a step takes, besides ``step_ms``."""
_SLOW_DISK = 50.0
"""Slowness of a disk that is to be opened long after its pager has started."""


def operate(world: World, mesh: Mesh, clients: Clients) -> None:
    """Pin prefixes of prompts now and then; in the end nothing is pinned."""
    dice = Random(f"operators {world.seed}")

    def pin() -> None:
        root, prompt = clients.asked(dice)
        ttl_s = dice.choice([None, None, 1])
        tell(dice.choice(mesh.pagers), PinPrefix(root=root.hex(), tokens=list(prompt), ttl_s=ttl_s))

    def unpin() -> None:
        for pager in mesh.pagers:
            tell(pager, UnpinPrefix(pin=None))
        if not clients.over or any(one.core is None for one in mesh.pagers):
            world.at(200.0, unpin)

    if dice.random() < 0.4:
        for _ in range(dice.randrange(1, 12)):
            world.at(dice.random() * STORM_MS, pin)
        world.at(STORM_MS + 1.0, unpin)


def tell(pager: PagerNode, message: Message) -> None:
    """Send ``message`` to ``pager``, if it hears; the answer is ignored."""
    if pager.hears:
        pager.handle(Asked(None, message))


def torn_declarations(world: World, mesh: Mesh, clients: Clients) -> None:
    """A pager dies while slow workers declare what they hold, and before they can declare it to the
    next one, an operator invalidates it: workers may still write to leases that are lost by
    then."""
    dice = Random(f"torn declarations {world.seed}")
    pager = dice.choice(mesh.pagers)
    workers = [worker for worker in mesh.workers if worker.host is pager.host]

    def begin() -> None:
        root, _ = clients.fresh(dice)
        for _ in range(dice.randrange(1, 4)):
            prompt = tuple(dice.randrange(model.VOCAB_TOKENS) for _ in range(30))
            clients.ask(root, prompt, 5.0 * dice.random())
        for worker in workers:
            # A step takes some two seconds: no draining worker outlasts who asks it again.
            worker.slowness = 2_000.0 / max(worker.step_ms, _WORK_MS)
            world.at(2_000.0, partial(setattr, worker, "slowness", 1.0))
        invalidate = partial(tell, pager, InvalidateCache(what="root", name=root.hex()))
        world.at(10.0 + 40.0 * dice.random(), partial(strike, invalidate))

    def strike(then: Callable[[], None]) -> None:
        mesh.restart(pager)
        pager.when_back.append(partial(tear, then))

    def tear(then: Callable[[], None]) -> None:
        pager.dies_amid = Declare
        pager.when_back.append(then)

    if dice.random() < 0.2:
        world.at(STORM_MS * (0.1 + 0.4 * dice.random()), begin)


class Invalidations:
    """Invalidates roots, in normal operation and while the pager or a worker dies."""

    def __init__(self, world: World, mesh: Mesh, clients: Clients) -> None:
        self._world, self._mesh, self._clients = world, mesh, clients
        self._dice = Random(f"invalidations {world.seed}")

    def begin(self, *, with_faults: bool) -> None:
        """Schedule some invalidations, in most worlds."""
        dice = self._dice
        if dice.random() < 0.4:
            return
        for _ in range(dice.choice([1, 1, 2, 3, 6])):
            acts: list[Callable[[PagerNode], None]] = [self._invalidate]
            if with_faults:
                acts += [self._after_restart, self._after_restart, self._before_death, self._torn]
            act, pager = dice.choice(acts), dice.choice(self._mesh.pagers)
            at_ms = STORM_MS * (0.15 + 0.8 * dice.random())
            if pager.host.disk is not None and dice.random() < 0.7:
                self._world.at(at_ms - 600.0 * dice.random(), self._ask_again)
                self._world.at(at_ms - 150.0 * dice.random(), partial(self._put_away, pager))
            self._world.at(at_ms, partial(act, pager))

    def _put_away(self, pager: PagerNode) -> None:
        """Have the pager write what is cached, as when it is told to stop; it may then go on."""
        if pager.hears:
            pager.handle(PutAway())

    def _after_restart(self, pager: PagerNode) -> None:
        """Invalidate as soon as there is a pager again: before workers have declared what they
        hold, and perhaps before its disk is open. A worker may be very late, and the new pager may
        die, too."""
        dice, disk = self._dice, pager.host.disk
        if disk is not None and dice.random() < 0.5:
            disk.slowness = _SLOW_DISK
            self._world.at(600.0, lambda: setattr(disk, "slowness", 1.0))
        root, prompt = self._clients.fresh(dice)  # is computed while there is no pager
        self._clients.ask(root, prompt, 0.0)
        if dice.random() < 0.3:
            worker = dice.choice([one for one in self._mesh.workers if one.host is pager.host])
            worker.freeze()
            self._world.at(300.0 + 1_000.0 * dice.random(), worker.thaw)
        message = self._message(root if dice.random() < 0.7 else None)
        act = self._before_death if dice.random() < 0.4 else self._invalidate
        delay_ms = dice.choice([0.0, 0.0, 3.0, 100.0])
        self._world.at(15.0 * dice.random(), partial(self._mesh.restart, pager))
        pager.when_back.append(lambda: self._world.at(delay_ms, partial(act, pager, message)))
        self._clients.ask(root, prompt, 500.0 + 500.0 * dice.random())

    def _before_death(self, pager: PagerNode, message: InvalidateCache | None = None) -> None:
        """Invalidate; soon after, the pager or a worker dies."""
        dice = self._dice
        self._invalidate(pager, message)
        victims = [pager, pager, *(one for one in self._mesh.workers if one.host is pager.host)]
        delay_ms = dice.choice([0.0, 1.0, 20.0, 200.0])
        self._world.at(delay_ms, partial(self._mesh.restart, dice.choice(victims)))

    def _torn(self, pager: PagerNode) -> None:
        """The pager dies while it invalidates; the operator may ask again."""
        if pager.hears:
            again = partial(self._invalidate, pager, message := self._message())
            pager.dies_soon = True
            self._invalidate(pager, message)
            if self._dice.random() < 0.5:
                pager.when_back.append(again)

    def _invalidate(self, pager: PagerNode, message: InvalidateCache | None = None) -> None:
        """Invalidate now."""
        message = message or self._message()
        if pager.hears:
            self._world.note("operator", message.what, f"{message.name:.4} at {pager.name}")
            pager.handle(Asked(partial(pager.host.invalidated, message), message))
            for _ in range(self._dice.choice([0, 1, 2])):
                self._ask_again(message.name)

    def _ask_again(self, name: str = "") -> None:
        """Send a request that would hit what was invalidated by ``name``, if it were still
        there."""
        dice, clients = self._dice, self._clients
        named = [root for root in clients.roots if root.hex() == name]
        clients.ask_again(dice, dice.choice(named or clients.roots), 200.0 * dice.random())

    def _message(self, root: bytes | None = None) -> InvalidateCache:
        """A message that invalidates ``root``, or a random root if that is None."""
        dice, root = self._dice, root or self._dice.choice(self._clients.roots)
        kinds: list[Literal["root", "tenant", "model", "idle"]] = ["root"] * 4
        what = dice.choice([*kinds, "tenant", "model", "idle"])
        names = {"root": root.hex(), "tenant": tenant_of(root), "model": MODEL, "idle": ""}
        return InvalidateCache(what=what, name=names[what])
