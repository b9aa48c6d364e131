"""A mesh without a model behind a real gateway: workers that exchange real messages on a real NATS
server and generate tokens by a rule."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from tests.unit.gateway.support import MODEL

from pagemesh.gateway.actor import GatewayActor
from pagemesh.gateway.api.sampling_defaults import OPENAI, SamplingDefaults
from pagemesh.gateway.calls.spec import RequestLimits
from pagemesh.gateway.doors.bus_door import BusDoor
from pagemesh.gateway.doors.front import Front
from pagemesh.gateway.doors.http import HttpDoor
from pagemesh.gateway.doors.tenants import Tenants
from pagemesh.gateway.words.tokens import Tokens
from pagemesh.runtime import rpc
from pagemesh.runtime.bus import Bus, Delivery, Subscription
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.runtime.ids import new_incarnation
from pagemesh.runtime.presence import Presence
from pagemesh.runtime.settings import BusConfig, GatewayConfig
from pagemesh.wire import codec, subjects
from pagemesh.wire.errors import Fault, Gone
from pagemesh.wire.messages import Ok, SequenceKey
from pagemesh.wire.pager_messages import Waterfall
from pagemesh.wire.presence import Announce, Load, ModelFacts, Role
from pagemesh.wire.tokens import pack, unpack
from pagemesh.wire.work_messages import (
    Abort,
    Accepted,
    Finish,
    Frame,
    Frames,
    Resend,
    Submit,
    TopLogprobs,
)

SECRET = b"a secret of the tests"
FACTS = ModelFacts(
    model=MODEL,
    model_root=b"m" * 32,
    context_tokens_max=4_096,
    vocab_tokens=261,
    page_size=16,
    pool_pages=200,
    deterministic=True,
)
Speech = Callable[[list[int]], list[int]]
"""The answer to a prompt, as tokens; it may end with an end token."""


def echo_speech(prompt: list[int]) -> list[int]:
    """The prompt, reversed."""
    return prompt[::-1]


@dataclass
class FakeWorker:
    """Answers with ``speech``, ``step_tokens`` per step, with ``pause_s`` between steps."""

    bus: Bus
    name: str
    role: Role
    speech: Speech = echo_speech
    pause_s: float = 0.0
    step_tokens: int = 1
    cached_tokens: int = 0
    refusal: Fault | None = None
    choice_logprobs: dict[int, float] = field(default_factory=dict)
    """Log-probability of all tokens of a choice; -0.5 by default."""
    incarnation: int = field(default_factory=new_incarnation)
    submits: list[Submit] = field(default_factory=list)
    aborts: list[Abort] = field(default_factory=list)
    counter: int = 0
    drop_counters: set[int] = field(default_factory=set)
    """Counters of messages to lose."""
    _tasks: dict[SequenceKey, asyncio.Task[None]] = field(default_factory=dict)
    _sent: dict[SequenceKey, list[Frame]] = field(default_factory=dict)
    _gateway: str = ""
    _gateway_incarnation: int = 0
    _listening: Subscription | None = None
    facts: ModelFacts = FACTS

    @property
    def announce(self) -> Announce:
        return Announce(
            role=self.role,
            name=self.name,
            incarnation=self.incarnation,
            host="host",
            state="ready",
            load=Load(running_count=len(self._tasks)),
            model=self.facts,
        )

    @property
    def running_count(self) -> int:
        return sum(not task.done() for task in self._tasks.values())

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FakeWorker]:
        presence = Presence(self.bus, MonotonicClock(), lambda: self.announce, period_ms=100)
        await self.listen()
        task = asyncio.create_task(presence.run())
        try:
            yield self
        finally:
            await self.stop_listening()
            self.stop_all()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def listen(self) -> None:
        self._listening = await self.bus.subscribe(subjects.worker(self.name), self._admit)

    async def stop_listening(self) -> None:
        """Stop listening, as a dead process does that others still consider present."""
        if self._listening is not None:
            await self.bus.unsubscribe(self._listening)

    def stop_all(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _admit(self, delivery: Delivery) -> None:
        message = codec.decode(delivery.data)
        match message:
            case Submit():
                self.submits.append(message)
                if self.refusal is not None:
                    delivery.respond_error(self.refusal)
                    return
                accepted = Accepted(worker=self.name, incarnation=self.incarnation)
                rpc.answer(delivery, accepted)
                self._gateway = message.gateway
                self._gateway_incarnation = message.gateway_incarnation
                for start in message.choices:
                    key = SequenceKey(
                        request=message.request, attempt=message.attempt, choice=start.choice
                    )
                    work = self._speak(message, key, unpack(start.generated).tolist())
                    self._tasks[key] = asyncio.create_task(work)
            case Abort():
                self.aborts.append(message)
                for key, task in self._tasks.items():
                    wanted = message.choice is None or message.choice == key.choice
                    if key.request == message.request and wanted and key.attempt <= message.attempt:
                        task.cancel()
                rpc.answer(delivery, Ok())
            case Resend():
                if message.key not in self._sent:
                    delivery.respond_error(Gone("no such sequence"))
                    return
                rpc.answer(delivery, Ok())
                again = [one for one in self._sent[message.key]]
                self._send(again)

    async def _speak(self, message: Submit, key: SequenceKey, generated: list[int]) -> None:
        prompt = unpack(message.prompt).tolist()
        wanted = self.speech(prompt)
        sampling = message.sampling
        self._sent[key] = []
        made = len(generated)
        first = True
        while True:
            fresh: list[int] = []
            finish: Finish | None = "length" if made >= sampling.max_tokens else None
            stop_token: int | None = None
            while finish is None and len(fresh) < self.step_tokens:
                token = wanted[made % len(wanted)]
                fresh.append(token)
                made += 1
                if token in sampling.stop_tokens and made > sampling.min_tokens:
                    finish, stop_token = "stop", token
                elif made >= sampling.max_tokens:
                    finish = "length"
            one = Frame(
                key=key,
                first_position=made - len(fresh),
                tokens=pack(fresh),
                finish=finish,
                stop_token=stop_token,
                logprobs=None
                if sampling.logprobs is None
                else scores(fresh, sampling.logprobs, self.choice_logprobs.get(key.choice, -0.5)),
                prompt_logprobs=scores(prompt[1:], sampling.logprobs or 0)
                if message.prompt_logprobs and first
                else None,
                waterfall=Waterfall(delivered_tokens=self.cached_tokens) if first else None,
            )
            first = False
            self._sent[key].append(one)
            self._send([one])
            if finish is not None:
                return
            await asyncio.sleep(self.pause_s)

    def _send(self, frames: list[Frame]) -> None:
        self.counter += 1
        if self.counter in self.drop_counters:
            return
        message = Frames(
            worker=self.name, incarnation=self.incarnation,
            gateway_incarnation=self._gateway_incarnation, counter=self.counter, frames=frames,
        )  # fmt: skip
        with contextlib.suppress(Fault):
            rpc.send(self.bus, subjects.gateway(self._gateway), message)


def scores(tokens: list[int], width: int, logprob: float = -0.5) -> TopLogprobs:
    """``logprob`` for each token; alternatives are 65, 66, ... at -1, -2, ..."""
    ids = np.tile(np.arange(65, 65 + width), len(tokens))
    values = np.tile(-1.0 - np.arange(width), len(tokens))
    return TopLogprobs(
        chosen=np.full(len(tokens), logprob, "<f4").tobytes(),
        width=width,
        top_tokens=ids.astype("<u4").tobytes(),
        top_values=values.astype("<f4").tobytes(),
    )


@dataclass
class FakeMesh:
    """A gateway with both doors open, and its workers."""

    url: str
    front: Front
    bus: Bus
    bus_door: BusDoor
    workers: list[FakeWorker]

    @property
    def worker(self) -> FakeWorker:
        return self.workers[0]


@contextlib.asynccontextmanager
async def fake_mesh(
    nats_url: str,
    model_folder: Path,
    *,
    roles: tuple[Role, ...] = ("decode",),
    api_keys: str = "",
    tenant_limits: str = "",
    config: GatewayConfig | None = None,
    defaults: SamplingDefaults = OPENAI,
    limits: RequestLimits | None = None,
    request_count_max: int = 64,
    model: str = MODEL,
) -> AsyncIterator[FakeMesh]:
    """A running fake mesh. Names are unique, so that tests can share one NATS server."""
    tail = f"{new_incarnation():x}"
    doors = config or GatewayConfig(http_port=0)
    async with contextlib.AsyncExitStack() as stack:
        connect = BusConfig(url=nats_url)
        worker_bus = await stack.enter_async_context(
            Bus.connect(connect, role="decode", name=f"w-{tail}")
        )
        bus = await stack.enter_async_context(
            Bus.connect(connect, role="gateway", name=f"g-{tail}")
        )
        workers = [
            await stack.enter_async_context(
                FakeWorker(
                    worker_bus, f"{role}-{index}-{tail}", role, facts=replace(FACTS, model=model)
                ).running()
            )
            for index, role in enumerate(roles)
        ]
        actor = GatewayActor(
            bus,
            name=f"g-{tail}",
            incarnation=new_incarnation(),
            host="host",
            model=model,
            secret=SECRET,
            request_count_max=request_count_max,
        )
        gateway = await stack.enter_async_context(actor.running())
        front = Front(
            gateway,
            Tokens.load(model_folder),
            Tenants(api_keys, SECRET, tenant_limits),
            model=model,
            request_timeout_ms=20_000,
            defaults=defaults,
            limits=limits or RequestLimits(worker_wait_ms_max=2_000),
        )
        stack.callback(front.next_turns.close)
        bus_door = await stack.enter_async_context(BusDoor(front, bus).open())
        url = await stack.enter_async_context(HttpDoor(front, doors).serve())
        gateway.announce("ready")
        yield FakeMesh(url, front, bus, bus_door, workers)
