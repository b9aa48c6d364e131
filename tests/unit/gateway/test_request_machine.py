"""One request under loss, duplication, reordering and dying workers: what the client gets is
always the beginning of the truth, and the request ends exactly once."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.gateway.support import REQUEST, frame, spec

from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.choice import TokensOnly
from pagemesh.gateway.calls.events import Route, Worker
from pagemesh.gateway.calls.frames import FrameTracker
from pagemesh.gateway.calls.request import RequestCore
from pagemesh.gateway.calls.spec import RequestLimits
from pagemesh.wire.errors import Busy, Gone
from pagemesh.wire.messages import Ok, Refused
from pagemesh.wire.work_messages import Accepted, Finish, Frames, Submit

CHOICES = 2
LENGTH = 12
TRUTH = [[100 * choice + at for at in range(LENGTH)] for choice in range(CHOICES)]
STEPS = ("make", "make", "make", "deliver", "deliver", "swap", "drop", "twice", "kill", "wait")


@dataclass
class Mesh:
    """One worker at a time, replaced when it is killed; what it sends waits in ``wire``."""

    core: RequestCore
    now_ms: int = 0
    incarnation: int = 1
    counter: int = 0
    running: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Choice: (attempt, tokens made so far)."""
    wire: list[tuple[Worker, Frames]] = field(default_factory=list)
    tracker: FrameTracker = field(default_factory=FrameTracker)
    delivered: list[list[int]] = field(default_factory=lambda: [[] for _ in range(CHOICES)])
    end_count: int = 0

    @property
    def worker(self) -> Worker:
        return Worker("worker", self.incarnation)

    def feed(self, event: ev.Event) -> None:
        queue = [event]
        while queue:
            for command in self.core.handle(queue.pop(0), self.now_ms):
                queue += self.perform(command)
            self.core.check()

    def perform(self, command: ev.Command) -> list[ev.Event]:
        match command:
            case ev.ChooseRoute():
                return [ev.Routed(Route(self.worker, None, b"m" * 32, b"r" * 32, 0))]
            case ev.SendSubmit(worker, message):
                return [ev.SubmitAnswered(message.attempt, worker, self.submitted(worker, message))]
            case ev.SendResend(worker, message):
                key = message.key
                known = self.running.get(key.choice)
                if worker != self.worker or known is None or known[0] != key.attempt:
                    return [ev.ResendAnswered(key, worker, Refused.of(Gone("who?")))]
                self.send(key.choice, message.position, known[1])
                return [ev.ResendAnswered(key, worker, Ok())]
            case ev.SendAbort(_, message):
                for choice in range(CHOICES) if message.choice is None else [message.choice]:
                    attempt, _ = self.running.get(choice, (0, 0))
                    if attempt <= message.attempt:
                        self.running.pop(choice, None)
            case ev.Deliver():
                assert command.first_position == len(self.delivered[command.choice])
                self.delivered[command.choice] += command.tokens.tolist()
                done = self.delivered[command.choice]
                assert done == TRUTH[command.choice][: len(done)]
            case ev.Ended():
                self.end_count += 1
        return []

    def submitted(self, worker: Worker, message: Submit) -> Accepted | Refused:
        if worker != self.worker:
            return Refused.of(Busy("another life"))
        for start in message.choices:
            self.running[start.choice] = (message.attempt, len(start.generated) // 4)
        return Accepted(worker=worker.name, incarnation=worker.incarnation)

    def make(self, choice: int, count: int) -> None:
        if choice in self.running:
            attempt, made = self.running[choice]
            upto = min(LENGTH, made + count)
            self.running[choice] = (attempt, upto)
            self.send(choice, made, upto)

    def send(self, choice: int, first: int, upto: int) -> None:
        attempt, _ = self.running[choice]
        tokens = TRUTH[choice][first:upto]
        finish: Finish | None = "length" if upto == LENGTH else None
        one = frame(first, tokens, attempt=attempt, choice=choice, finish=finish)
        self.counter += 1
        message = Frames(
            worker="worker", incarnation=self.incarnation, gateway_incarnation=1,
            counter=self.counter, frames=[one],
        )  # fmt: skip
        self.wire.append((self.worker, message))

    def deliver(self, at: int, *, keep: bool = False) -> None:
        if not self.wire:
            return
        worker, message = self.wire[at % len(self.wire)]
        if not keep:
            self.wire.pop(at % len(self.wire))
        if self.tracker.arrived(worker, message):
            self.feed(ev.FramesMissed(worker))
        for one in message.frames:
            self.feed(ev.FrameArrived(worker, one))

    def kill(self) -> None:
        dead = self.worker
        self.incarnation += 1
        self.counter = 0
        self.running.clear()
        self.feed(ev.WorkerLost(dead))

    def wait(self, duration_ms: int) -> None:
        until = self.now_ms + duration_ms
        while not self.core.ended and self.core.due_ms <= until:
            self.now_ms = max(self.now_ms, self.core.due_ms)
            self.feed(ev.Tick())
        self.now_ms = until


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 7), st.integers(1, 4)), max_size=60)
)
def test_whatever_the_network_does_the_client_gets_the_truth_once(
    steps: list[tuple[str, int, int]],
) -> None:
    request = spec(choices=CHOICES, max_tokens=LENGTH, deadline_ms=10_000_000)
    limits = RequestLimits(failures_max=1_000)
    core = RequestCore(request, limits, [TokensOnly() for _ in range(CHOICES)], 0)
    mesh = Mesh(core)
    mesh.feed(ev.Begin())
    for step, at, count in steps:
        if step == "make":
            mesh.make(at % CHOICES, count)
        elif step == "deliver":
            mesh.deliver(0)
        elif step == "swap":
            mesh.deliver(at)
        elif step == "twice":
            mesh.deliver(at, keep=True)
        elif step == "drop" and mesh.wire:
            mesh.wire.pop(at % len(mesh.wire))
        elif step == "kill":
            mesh.kill()
        elif step == "wait":
            mesh.wait(100 * count)
    for _ in range(200):  # the network is good again
        for choice in range(CHOICES):
            mesh.make(choice, LENGTH)
        while mesh.wire:
            mesh.deliver(0)
        mesh.wait(2_500)
        if core.ended:
            break
    assert mesh.delivered == TRUTH
    assert mesh.end_count == 1
    assert core.spec.request == REQUEST
