"""A test bench for one worker core: the test acts as pager, peer, gateway and executor."""

from __future__ import annotations

import itertools
from typing import TypeVar

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker.core import WorkerCore
from pagemesh.engine.worker.plan import Drawn, RowResult, StepPlan, StepResult, plan_after
from pagemesh.engine.worker.settings import RoleSettings, WorkerIdentity, WorkerLimits
from pagemesh.wire.messages import Message, Ok, Order, Refused, SequenceKey
from pagemesh.wire.pager_messages import (
    Admit,
    Fork,
    Granted,
    Handle,
    Offer,
    Offered,
    OpenSession,
    PoolSpec,
    Redeem,
    SessionOpened,
)
from pagemesh.wire.tokens import pack, pack_extents, unpack
from pagemesh.wire.work_messages import Attach, ChoiceStart, Frame, Sampling, Submit

REQUEST = "0" * 31 + "1"
ROOT = b"r" * 32
MODEL_ROOT = b"m" * 32
PAGE_SIZE = 4
POOL_PAGES = 64
PREFILL = RoleSettings(role="prefill", hand_over=True, step_tokens_max=16, chunk_tokens_max=8)
DECODE = RoleSettings(role="decode", hand_over=False, step_tokens_max=16, chunk_tokens_max=8)
_SPEC = PoolSpec(layout_digest=b"d" * 32, page_size=PAGE_SIZE, page_bytes=64)
T = TypeVar("T", bound=Message)
C = TypeVar("C")


def key(choice: int = 0, attempt: int = 1) -> SequenceKey:
    return SequenceKey(request=REQUEST, attempt=attempt, choice=choice)


def submit(
    prompt: int = 10,
    *,
    choices: int = 1,
    attempt: int = 1,
    max_tokens: int = 5,
    decode: str | None = None,
    generated: tuple[int, ...] = (),
    deadline_ms: int = 60_000,
    stop: int | None = None,
    prompt_logprobs: bool = False,
) -> Submit:
    return Submit(
        request=REQUEST,
        attempt=attempt,
        gateway="gw",
        gateway_incarnation=1,
        priority=0,
        arrival_us=7,
        root=ROOT,
        model_root=MODEL_ROOT,
        prompt=pack(range(100, 100 + prompt)),
        choices=[ChoiceStart(choice=n, generated=pack(generated)) for n in range(choices)],
        sampling=Sampling(max_tokens=max_tokens, stop_tokens=[] if stop is None else [stop]),
        prompt_logprobs=prompt_logprobs,
        decode=decode,
        deadline_ms=deadline_ms,
    )


def attach(prompt: int = 10, *, filled: int = 10, pages: int = 4) -> Attach:
    return Attach(
        key=key(),
        order=Order(priority=0, arrival_us=7, request=REQUEST, choice=0),
        gateway="gw",
        gateway_incarnation=1,
        prefill="p",
        root=ROOT,
        model_root=MODEL_ROOT,
        prompt=pack(range(100, 100 + prompt)),
        generated=pack([50]),
        sampling=Sampling(max_tokens=5),
        ticket="7" * 32,
        handle=handle(lease=900, filled=filled, pages=pages),
        deadline_ms=60_000,
    )


def handle(*, lease: int, filled: int, pages: int) -> Handle:
    return Handle(
        host="h",
        pool_incarnation=1,
        pool=0,
        group=0,
        layout_digest=b"d" * 32,
        lease=lease,
        granted_at=lease,
        extents=pack_extents(range(pages)),
        token_count=filled,
        ttl_ms=10_000,
    )


class Bench:
    def __init__(self, role: RoleSettings = DECODE, **limits: int) -> None:
        settings = {"growth_pages": 1, "commit_pages": 1, **limits}
        self.limits = WorkerLimits(**settings)
        tickets = itertools.count(1)
        self.core = WorkerCore(
            WorkerIdentity("me", 5, "me-5", _SPEC, MODEL_ROOT),
            role,
            self.limits,
            lambda: f"{next(tickets):032x}",
        )
        self.now = 0.0
        self.open: dict[int, ev.CallPager | ev.CallWorker] = {}
        self.plan: StepPlan | None = None
        self.frames: list[Frame] = []
        self.sent: list[ev.SendFrames] = []
        self.answers: dict[int, Message] = {}
        self.log: list[ev.Command] = []
        self._lease = 100
        self._page = 0
        self._call = 0

    # Events ---------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> list[ev.Command]:
        commands = self.core.handle(event, self.now)
        self.core.check()
        self.log += commands
        for command in commands:
            match command:
                case ev.CallPager() | ev.CallWorker():
                    self.open[command.call_id] = command
                case ev.RunStep():
                    assert self.plan is None, "two steps at once"
                    self.plan = command.plan
                case ev.SendFrames():
                    self.sent.append(command)
                    self.frames += command.frames.frames
                case ev.Answer():
                    self.answers[command.call] = command.message
                case _:
                    pass
        return commands

    def tick(self, ms: float = 40.0) -> list[ev.Command]:
        self.now += ms
        return self.handle(ev.Tick())

    def ask(self, message: Message) -> Message:
        """Send a request, which the core must answer at once."""
        self._call += 1
        self.handle(ev.Received(self._call, message))
        return self.answers[self._call]

    def notice(self, message: Message) -> None:
        self.handle(ev.Received(None, message))

    def asked(self, kind: type[T]) -> T:
        """The message of the only open call of that kind."""
        found = [call.message for call in self.open.values() if isinstance(call.message, kind)]
        assert len(found) == 1, f"{len(found)} open {kind.__name__}"
        return found[0]

    def open_kinds(self) -> list[str]:
        return sorted(type(call.message).__name__ for call in self.open.values())

    def answer(self, kind: type[Message], reply: Message) -> list[ev.Command]:
        """Answer the oldest open call of that kind."""
        number = next(n for n, call in self.open.items() if isinstance(call.message, kind))
        call = self.open.pop(number)
        if isinstance(call, ev.CallPager):
            return self.handle(ev.PagerAnswered(number, reply))
        return self.handle(ev.PeerAnswered(number, reply))

    def fail(self, kind: type[Message], code: str) -> list[ev.Command]:
        return self.answer(kind, Refused(code=code, message="as the test wants"))

    def step(self, token: int = 50, *, revoked: bool = False) -> StepPlan:
        """Finish the running step, with ``token`` drawn for every sample; a run ends there."""
        plan = self.plan
        assert plan is not None, "no step is running"
        self.plan = None
        self.handle(ev.StepsFinished((result_of(plan, token, revoked=revoked),)))
        return plan

    def run(self, *tokens: int, goes_on: bool = True) -> list[ev.Command]:
        """Finish steps of the current run, one for each of ``tokens``, reported together. The run
        ends there unless it ``goes_on`` and can."""
        results = []
        for token in tokens:
            plan = self.plan
            assert plan is not None, "no run goes on"
            results.append(result_of(plan, token))
            self.plan = plan_after(plan, results[-1])
        if not goes_on:
            self.plan = None
        return self.handle(ev.StepsFinished(tuple(results), self.plan is not None))

    # Shortcuts ------------------------------------------------------------------------------

    def start(self) -> Bench:
        """Open the session."""
        self.tick()
        self.answer(OpenSession, opened())
        return self

    def granted(
        self, want: Admit | Redeem, *, cached: int = 0, pages: int | None = None
    ) -> Granted:
        """A grant with as many pages as requested."""
        self._lease += 1
        count = pages if pages is not None else -(-want.reserve_tokens // PAGE_SIZE)
        first, self._page = self._page, self._page + count
        return Granted(
            key=want.key,
            lease=self._lease,
            lease_slot=self._lease,
            granted_at=self._lease,
            extents=pack_extents(range(first, first + count)),
            cached_tokens=cached,
        )

    def grant(self, *, cached: int = 0, pages: int | None = None) -> Granted:
        granted = self.granted(self.asked(Admit), cached=cached, pages=pages)
        self.answer(Admit, granted)
        return granted

    def offered(self) -> Offered:
        offer = self.asked(Offer)
        filled = offer.fill.filled_tokens
        offered = Offered(
            ticket=offer.ticket,
            handle=handle(lease=offer.lease, filled=filled, pages=-(-filled // PAGE_SIZE)),
        )
        self.answer(Offer, offered)
        return offered

    def settle(self) -> None:
        """Answer ``Ok`` to all open calls, until there are none."""
        for _ in range(20):
            if not self.open:
                return
            number = next(iter(self.open))
            del self.open[number]
            self.handle(ev.PagerAnswered(number, Ok()))
        raise AssertionError(f"still asking: {self.open_kinds()}")

    def tokens(self, choice: int = 0) -> list[int]:
        """The tokens of a choice that a gateway has got, in order of position."""
        have: dict[int, int] = {}
        for frame in self.frames:
            if frame.key.choice == choice:
                for offset, token in enumerate(unpack(frame.tokens).tolist()):
                    have[frame.first_position + offset] = token
        assert sorted(have) == list(range(len(have))), f"a gap in {have}"
        return [have[position] for position in range(len(have))]


def result_of(
    plan: StepPlan, token: int, *, revoked: bool = False, spoiled: SequenceKey | None = None
) -> StepResult:
    """A result with ``token`` for every sample; the row of ``spoiled`` is poisoned."""
    rows = tuple(
        RowResult(row.key, row.lease, revoked=revoked, drawn=() if revoked else tuple(
            Drawn(one.key, token, poisoned=row.key == spoiled) for one in row.samples
        ))
        for row in plan.rows
    )  # fmt: skip
    return StepResult(plan.step, rows)


def opened(epoch: int = 1, pool_incarnation: int = 1) -> SessionOpened:
    return SessionOpened(
        host="h",
        epoch=epoch,
        pool_incarnation=pool_incarnation,
        pool=0,
        pool_path="/pool",
        page_count=POOL_PAGES,
        session_ttl_ms=5_000,
        heartbeat_ms=1_000,
    )


def of_kind(commands: list[ev.Command], kind: type[C]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


def code(answer: Message) -> str:
    """The code of a refusal; empty for any other answer."""
    return answer.code if isinstance(answer, Refused) else ""


def finished(max_tokens: int = 3, *, bench: Bench | None = None) -> Bench:
    """A bench after a whole answer, with tokens from 51 on."""
    bench = bench or Bench().start()
    bench.ask(submit(10, max_tokens=max_tokens))
    bench.grant(cached=8)
    for token in range(51, 51 + max_tokens):
        bench.step(token)
    bench.settle()
    return bench


def at_fork() -> tuple[Bench, Fork]:
    """A bench with two choices of a prompt of ten tokens (eight of them cached) that are about to
    fork, and the open ``Fork``."""
    bench = Bench().start()
    bench.ask(submit(10, choices=2))
    bench.grant(cached=8)
    bench.step(51)
    return bench, bench.asked(Fork)


def child_of(fork: Fork, child: SequenceKey) -> Redeem:
    """A message by which ``Bench.granted`` can grant a forked choice."""
    return Redeem(
        key=child,
        worker="me",
        incarnation=5,
        epoch=1,
        ticket="0" * 32,
        handle=handle(lease=1, filled=1, pages=1),
        reserve_tokens=fork.reserve_tokens,
    )
