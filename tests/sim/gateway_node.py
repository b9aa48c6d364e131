"""A gateway as a simulated process: a real ``RequestCore`` for each request, and clients that check
every token they get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from tests.sim import model
from tests.sim.world import Network, Process, Reply, World

from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.choice import TokensOnly
from pagemesh.gateway.calls.frames import FrameTracker
from pagemesh.gateway.calls.request import RequestCore
from pagemesh.gateway.calls.spec import RequestLimits, RequestSpec
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.errors import Busy, Stale
from pagemesh.wire.messages import Message, Ok, Refused
from pagemesh.wire.work_messages import Accepted, Frames, Sampling

_ANSWER_SLACK_MS = 50.0
Choose = Callable[[ev.ChooseRoute, bytes], ev.Route | None]


@dataclass(frozen=True, slots=True)
class Ask:
    """The request of a client, and its timing."""

    request: str
    root: bytes
    """The root of its tenant's tree under the first weights."""
    prompt: tuple[int, ...]
    choice_count: int
    sampling: Sampling
    start_ms: float
    patience_ms: int
    leaves_ms: float | None
    """When the client leaves, in ms after its start; None: it stays."""
    prompt_logprobs: bool
    terms: CacheTerms


@dataclass(slots=True)
class Client:
    """One request as its client sees it."""

    ask: Ask
    deadline_ms: float
    delivered: dict[int, list[int]] = field(default_factory=dict)
    scores: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Scores, by choice and position of their first token."""
    prompt_scores: bytes | None = None
    ended_choices: set[int] = field(default_factory=set)
    outcome: ev.Completed | ev.Failed | ev.Cancelled | None = None
    orphaned: bool = False
    """Its gateway was killed: its stream ends without an answer."""

    @property
    def over(self) -> bool:
        return self.orphaned or self.outcome is not None


class GatewayNode(Process):
    def __init__(
        self, world: World, network: Network, name: str, limits: RequestLimits, choose: Choose
    ) -> None:
        super().__init__(world, name)
        self.incarnation = 0
        self.clients: list[Client] = []
        self.attempts_count = 0
        self._network = network
        self._limits = limits
        self._choose = choose
        self._ahead_ms = 150 * (sum(name.encode()) % 4)
        """How far its host's clock is ahead of other hosts'."""
        self._tracker = FrameTracker()
        self._cores: dict[str, tuple[RequestCore, Client]] = {}
        network.serve(self, self._received)

    def start(self) -> None:
        self.begin()
        self.incarnation += 1
        self._tracker = FrameTracker()
        self._cores = {}

    def stop(self) -> None:
        for _, client in self._cores.values():
            client.orphaned = client.outcome is None
        self._cores = {}
        self.kill()

    def take(self, ask: Ask) -> None:
        """Accept the request of a client."""
        world = self.world
        client = Client(ask, world.now + ask.patience_ms)
        self.clients.append(client)
        spec = RequestSpec(
            request=ask.request,
            gateway=self.name,
            gateway_incarnation=self.incarnation,
            priority=0,
            arrival_us=int(1_000 * (world.now + self._ahead_ms)),
            prompt=np.array(ask.prompt, "<u4"),
            choice_count=ask.choice_count,
            sampling=ask.sampling,
            deadline_ms=int(client.deadline_ms),
            prompt_logprobs=ask.prompt_logprobs,
            terms=ask.terms,
        )
        texts = [TokensOnly() for _ in range(ask.choice_count)]
        core = RequestCore(spec, self._limits, texts, int(world.now))
        self._cores[ask.request] = (core, client)
        self._handle(ask.request, ev.Begin())
        if ask.leaves_ms is not None:
            self.at(ask.leaves_ms, lambda: self._handle(ask.request, ev.ClientGone()))
        self._watch(client)

    def worker_lost(self, worker: ev.Worker) -> None:
        for request in list(self._cores):
            self._handle(request, ev.WorkerLost(worker))

    def _watch(self, client: Client) -> None:
        """Check that the client has its answer by the deadline."""

        def due() -> None:
            slept = self.frozen or client.deadline_ms <= self.thawed_ms
            if not client.over and self.alive and not slept:
                self.world.expect(False, f"{client.ask.request} has no answer by its deadline")

        self.world.at(client.ask.patience_ms + _ANSWER_SLACK_MS, due)

    # The actor's part -----------------------------------------------------------------------

    def _handle(self, request: str, event: ev.Event) -> None:
        known = self._cores.get(request)
        if known is None:
            return
        core, client = known
        self.world.note(self.name, "event", event)
        commands = core.handle(event, int(self.world.now))
        core.check()
        for command in commands:
            self._perform(core, client, command)
        if core.ended:
            self._cores.pop(request, None)
        else:
            self._wake(request, core)

    def _wake(self, request: str, core: RequestCore) -> None:
        due_ms = core.due_ms

        def due() -> None:
            known = self._cores.get(request)
            if known is not None and known[0] is core and core.due_ms <= self.world.now:
                self._handle(request, ev.Tick())

        self.at(max(due_ms - self.world.now, 1.0), due)

    def _perform(self, core: RequestCore, client: Client, command: ev.Command) -> None:
        request = client.ask.request
        match command:
            case ev.ChooseRoute():
                route = self._choose(command, client.ask.root)
                if route is None:
                    self._handle(request, ev.Unroutable(Busy("no worker", retry_after_ms=50)))
                else:
                    self._handle(request, ev.Routed(route))
            case ev.SendSubmit():
                self._submit(request, command)
            case ev.SendAbort():
                self._network.send(self, command.worker.name, command.message)
            case ev.SendResend():
                self._resend(request, command)
            case ev.PromptScored():
                client.prompt_scores = command.logprobs.chosen
                self.world.expect(self._is_right(client), f"{request}: wrong prompt scores")
            case ev.Deliver():
                self._delivered(client, command)
            case ev.ChoiceEnded():
                self._choice_ended(client, command)
            case ev.Ended():
                self._ended(client, command)

    def _submit(self, request: str, command: ev.SendSubmit) -> None:
        self.attempts_count += 1
        self.world.note(self.name, "submit", (command.worker, command.message))

        def answered(message: Message) -> None:
            assert isinstance(message, Accepted | Refused)
            attempt = command.message.attempt
            if isinstance(message, Refused) and message.code == "DeadlineExceeded":
                message = Refused.of(Busy("the worker did not answer in time"))
            elif isinstance(message, Accepted):
                if message.incarnation != command.worker.incarnation:
                    message = Refused.of(Stale("another life of the worker answered"))
            self._handle(request, ev.SubmitAnswered(attempt, command.worker, message))

        target, pages = command.worker.name, command.pages
        self._network.call(self, target, command.message, command.timeout_ms, answered)
        if pages is not None:
            self._network.ask_for(self, target, pages.host, pages.message)

    def _resend(self, request: str, command: ev.SendResend) -> None:
        def answered(message: Message) -> None:
            assert isinstance(message, Ok | Refused)
            key = command.message.key
            self._handle(request, ev.ResendAnswered(key, command.worker, message))

        target = command.worker.name
        self._network.call(self, target, command.message, command.timeout_ms, answered)

    def _received(self, reply: Reply | None, message: Message) -> None:
        assert isinstance(message, Frames)
        worker = ev.Worker(message.worker, message.incarnation)
        ours = message.gateway_incarnation == self.incarnation
        if ours and self._tracker.arrived(worker, message):
            for request in list(self._cores):
                self._handle(request, ev.FramesMissed(worker))
        for frame in message.frames:
            self._handle(frame.key.request, ev.FrameArrived(worker, frame))

    # The client's part ----------------------------------------------------------------------

    def _expected(self, client: Client, choice: int, weights: int) -> tuple[tuple[int, ...], bytes]:
        ask = client.ask
        root, sampling = model.tree_root(ask.root, weights), ask.sampling
        stops = bool(sampling.stop_tokens)
        if (beams := sampling.beams) is not None:
            limit = sampling.max_tokens
            found = model.searched(root, ask.prompt, beams.width, beams.keep, limit, stops)
            return found[choice], b""
        return model.answer(root, ask.prompt, sampling.seed, choice, sampling.max_tokens, stops)

    def _is_right(self, client: Client) -> bool:
        """Whether all that the client has was produced by one set of weights."""
        return any(self._are_of(client, weights) for weights in model.WEIGHTS)

    def _are_of(self, client: Client, weights: int) -> bool:
        ask = client.ask
        if client.prompt_scores is not None:
            root = model.tree_root(ask.root, weights)
            if client.prompt_scores != model.prompt_scores(root, ask.prompt):
                return False
        for choice, have in client.delivered.items():
            tokens, _ = self._expected(client, choice, weights)
            if tuple(have) != tokens[: len(have)]:
                return False
            if choice in client.ended_choices and len(have) != len(tokens):
                return False
        for (choice, first), known in client.scores.items():
            _, scores = self._expected(client, choice, weights)
            if known != scores[4 * first : 4 * first + len(known)]:
                return False
        return True

    def _delivered(self, client: Client, command: ev.Deliver) -> None:
        expect = self.world.expect
        name = f"{client.ask.request} choice {command.choice}"
        have = client.delivered.setdefault(command.choice, [])
        first = len(have)
        have.extend(command.tokens.tolist())
        expect(not client.over, f"{name}: tokens after the end")
        expect(command.choice not in client.ended_choices, f"{name}: tokens after its end")
        expect(command.first_position == first, f"{name}: position {command.first_position}")
        sampling, logprobs = client.ask.sampling, command.logprobs
        if sampling.logprobs is not None and sampling.beams is None:
            known = logprobs.chosen if logprobs is not None else b""
            expect(len(known) == 4 * len(command.tokens), f"{name}: tokens without their scores")
            client.scores[command.choice, first] = known
        if not self._is_right(client):
            tokens, _ = self._expected(client, command.choice, 0)
            expect(False, f"{name}: delivered {have} or their scores, expected {tokens}")

    def _choice_ended(self, client: Client, command: ev.ChoiceEnded) -> None:
        name = f"{client.ask.request} choice {command.choice}"
        have = client.delivered.setdefault(command.choice, [])
        self.world.expect(command.choice not in client.ended_choices, f"{name} ended twice")
        client.ended_choices.add(command.choice)
        self.world.expect(self._is_right(client), f"{name} ended with {have}")

    def _ended(self, client: Client, command: ev.Ended) -> None:
        expect, name = self.world.expect, client.ask.request
        expect(not client.over, f"{name}: a second answer")
        client.outcome = command.outcome
        self.world.note(self.name, "ended", (name, command.outcome))
        late = self.world.now - client.deadline_ms - _ANSWER_SLACK_MS
        excused = client.ask.leaves_ms is not None or client.deadline_ms <= self.thawed_ms
        expect(late <= 0 or self.life > 1 or excused, f"{name} is late")
        if isinstance(command.outcome, ev.Completed):
            complete = len(client.ended_choices) == client.ask.choice_count
            expect(complete, f"{name} completed without all choices")
            scored = not client.ask.prompt_logprobs or client.prompt_scores is not None
            expect(scored, f"{name} completed without the scores of its prompt")
