"""The clients of a run: which requests are sent, and when."""

from __future__ import annotations

from random import Random

from tests.sim import model
from tests.sim.gateway_node import Ask, Client
from tests.sim.growths import tenant_of
from tests.sim.mesh import Mesh
from tests.sim.world import World

from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.work_messages import Beams, Sampling

STORM_MS = 4_000.0
"""How long faults are injected; most requests are sent in that time."""
PATIENCE_MS = 20_000


class Clients:
    """Makes requests: shared prefixes, crowds, conversations, several choices, clients that
    leave."""

    def __init__(self, world: World, mesh: Mesh) -> None:
        self._world = world
        self._mesh = mesh
        self._pending = 0
        self._made = 0
        dice = world.random
        self._roots = [bytes([65 + index]) * 32 for index in range(dice.choice([1, 1, 2]))]
        self._terms_dice = Random(f"terms {world.seed}")
        self._beams_dice = Random(f"beams {world.seed}")
        self._ttls_s = self._terms_dice.choice([[0], [0, 1, 2], [1, 3]])
        self._quota_pages = -(-112 // mesh.hosts[0].memory.page_size)
        self._prefixes = [self._words(dice.randrange(4, 30)) for _ in range(3)]

    @property
    def all(self) -> list[Client]:
        return [client for gateway in self._mesh.gateways for client in gateway.clients]

    @property
    def over(self) -> bool:
        return not self._pending and all(client.over for client in self.all)

    @property
    def roots(self) -> list[bytes]:
        return self._roots

    def asked(self, dice: Random) -> tuple[bytes, tuple[int, ...]]:
        """Root and prompt of an earlier request, or of one that is likely to come."""
        if asks := [client.ask for client in self.all]:
            ask = dice.choice(asks)
            return ask.root, ask.prompt
        return self._roots[0], self._prefixes[0]

    def ask_again(self, dice: Random, root: bytes, delay_ms: float) -> None:
        """Repeat one of the last requests answered under ``root``, if any."""
        done = [client for client in self.all if client.ended_choices]
        asks = [client.ask for client in done if client.ask.root == root]
        if asks:
            self._ask_at(delay_ms, root, dice.choice(asks[-3:]).prompt, 0)

    def fresh(self, dice: Random) -> tuple[bytes, tuple[int, ...]]:
        """Root and prompt of a short new request."""
        prompt = tuple(dice.randrange(model.VOCAB_TOKENS) for _ in range(dice.randrange(3, 14)))
        return dice.choice(self._roots), prompt

    def ask(self, root: bytes, prompt: tuple[int, ...], delay_ms: float) -> None:
        """Send such a request after ``delay_ms``."""
        self._ask_at(delay_ms, root, prompt, 0)

    def begin(self) -> None:
        dice = self._world.random
        bursts = [dice.random() * STORM_MS * 0.8 for _ in range(dice.randrange(1, 8))]
        for _ in range(dice.randrange(6, 16)):
            root = dice.choice(self._roots)
            prompt = dice.choice(self._prefixes) + self._words(dice.randrange(1, 24))
            start_ms = dice.choice(bursts) + 60.0 * dice.random()
            self._ask_at(start_ms, root, prompt, dice.randrange(3))
        for _ in range(dice.choice([0, 0, 1, 2])):
            self._crowd()

    def _crowd(self) -> None:
        """Many almost equal requests at once: most of them can wait for one to compute the
        prefix."""
        dice = self._world.random
        root, prompt = dice.choice(self._roots), self._words(dice.randrange(8, 50))
        start_ms = dice.random() * STORM_MS * 0.8
        for _ in range(dice.randrange(3, 9)):
            own = self._words(dice.choice([0, 0, 1, 6]))
            self._ask_at(start_ms + 5.0 * dice.random(), root, prompt + own, 0)

    def _words(self, count: int) -> tuple[int, ...]:
        dice = self._world.random
        return tuple(dice.randrange(model.VOCAB_TOKENS) for _ in range(count))

    def _ask_at(self, delay_ms: float, root: bytes, prompt: tuple[int, ...], turns: int) -> None:
        self._pending += 1

        def due() -> None:
            self._pending -= 1
            dice = self._world.random
            open_ones = [one for one in self._mesh.gateways if one.alive]
            if not open_ones:
                self._ask_at(200.0, root, prompt, turns)
                return
            ask = self._ask(root, prompt)
            dice.choice(open_ones).take(ask)
            if turns:
                self._next_turn(ask, turns - 1)

        self._world.at(delay_ms, due)

    def _next_turn(self, ask: Ask, turns: int) -> None:
        """Continue the conversation with its answer, if that comes in time."""
        self._pending += 1

        def due() -> None:
            self._pending -= 1
            client = next(one for one in self.all if one.ask is ask)
            answer = tuple(client.delivered.get(0, ()))
            if 0 in client.ended_choices and len(ask.prompt) + len(answer) < 60:
                self._ask_at(1.0, ask.root, ask.prompt + answer + self._words(3), turns)

        self._world.at(100.0 + 300.0 * self._world.random.random(), due)

    def _ask(self, root: bytes, prompt: tuple[int, ...]) -> Ask:
        dice = self._world.random
        self._made += 1
        several = dice.random() < 0.25
        beams, limit = self._beams(prompt), dice.choice([1, 2, 5, 12, 24, 40])
        leaves = dice.random() < 0.12
        return Ask(
            request=f"{self._world.seed & 0xFFFF:016x}{self._made:016x}",
            root=root,
            prompt=prompt,
            choice_count=beams.keep if beams else dice.randrange(2, 5) if several else 1,
            sampling=Sampling(
                seed=dice.randrange(1 << 30),
                max_tokens=limit if beams is None else min(limit, 12),
                beams=beams,
                stop_tokens=[model.STOP_TOKEN] if dice.random() < 0.7 else [],
                logprobs=0 if dice.random() < 0.3 else None,
            ),
            start_ms=self._world.now,
            patience_ms=PATIENCE_MS if dice.random() < 0.9 else dice.randrange(50, 1_500),
            leaves_ms=dice.random() * 300.0 if leaves else None,
            prompt_logprobs=dice.random() < 0.1 and beams is None,
            terms=self._terms(root),
        )

    def _terms(self, root: bytes) -> CacheTerms:
        """In some worlds, much is cached for a short time only. The second tenant has a quota that
        holds little more than one of its sequences."""
        quota_pages = self._quota_pages if root != self._roots[0] else 0
        ttl_s = self._terms_dice.choice(self._ttls_s)
        return CacheTerms(tenant=tenant_of(root), pages_max=quota_pages, ttl_s=ttl_s)

    def _beams(self, prompt: tuple[int, ...]) -> Beams | None:
        """Now and then a beam search, small enough for a tiny pool."""
        dice = self._beams_dice
        if dice.random() > 0.12 or len(prompt) > 50:
            return None
        width = dice.choice([1, 2, 3])
        return Beams(width=width, keep=dice.randrange(1, width + 1), early_stopping=True)
