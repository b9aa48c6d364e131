"""What operators do meanwhile, at the door of each pager."""

from __future__ import annotations

from random import Random

from tests.sim.clients import STORM_MS, Clients
from tests.sim.mesh import Mesh
from tests.sim.pager_node import PagerNode
from tests.sim.world import World

from pagemesh.pager.events import Asked
from pagemesh.wire.cache_messages import PinPrefix, UnpinPrefix
from pagemesh.wire.messages import Message


def operate(world: World, mesh: Mesh, clients: Clients) -> None:
    """Somebody pins beginnings of prompts now and then; in the end nothing is pinned."""
    dice = Random(f"operators {world.seed}")

    def tell(pager: PagerNode, message: Message) -> None:
        if pager.alive and not pager.frozen and pager.core is not None:
            pager.handle(Asked(None, message))

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
