"""The worker's actor: everything around ``WorkerCore`` that waits, sends or computes.

    bus messages, presence, ticks --> [ inbox ] --> core --> answers, calls, frames
                                         ^            |
                                         +--- step thread <-- plans

The actor is never restarted in the same process: after a crash of its core the process may still
write to pages. So the process ends, which frees its lock, and the pager takes the pages back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile

import msgspec

from pagemesh.engine.grammars import Grammars
from pagemesh.engine.worker import measures
from pagemesh.engine.worker.core import WorkerCore
from pagemesh.engine.worker.events import (
    Answer,
    CallPager,
    CallWorker,
    Command,
    Drained,
    EndRun,
    Event,
    Finished,
    PagerAnswered,
    PeerAnswered,
    PoolMissing,
    Preempted,
    Received,
    RunStep,
    SendFrames,
    StepsFinished,
    Tick,
    UsePool,
)
from pagemesh.engine.worker.grammar_gate import Compiled, GrammarGate
from pagemesh.engine.worker.preemptions import Preemptions
from pagemesh.engine.worker.spans import OpenCall, SequenceSpans
from pagemesh.engine.worker.stepper import PoolingExecutor, Stepper, StepsDone
from pagemesh.engine.worker.turned_away import TurnedAway
from pagemesh.engine.worker.turns import Turns
from pagemesh.engine.worker.vetting import keys_of, vet
from pagemesh.runtime import rpc, trace
from pagemesh.runtime.actor import Behaviour
from pagemesh.runtime.bus import Bus, Delivery, Reply
from pagemesh.runtime.clock import Clock
from pagemesh.runtime.logs import get_logger
from pagemesh.wire import codec, subjects
from pagemesh.wire.errors import ConfigError, Fault, Malformed
from pagemesh.wire.messages import Message, Refused
from pagemesh.wire.pager_messages import Extended, Granted, OpenSession, SessionOpened
from pagemesh.wire.pager_reports import InspectWorker, WorkerReport
from pagemesh.wire.presence import Load
from pagemesh.wire.work_messages import Attach, Submit

_LOAD_PERIOD_US = 100_000
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Crashed:
    """The step thread or a call raised something unexpected: nothing it would do next could be
    trusted, and whatever waits for it would wait for ever."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class PoolRefused:
    """The pager can never give this worker a first pool: a setting is wrong, which ``error``
    names."""

    error: ConfigError


@dataclass(frozen=True, slots=True)
class PoolDiscarded:
    """The pager has discarded the pool and is about to have another made; there may be no room
    for both."""


Input = Delivery | Event | StepsDone | Crashed | PoolRefused | PoolDiscarded | Compiled


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the actor works with, and its callbacks."""

    bus: Bus
    clock: Clock
    role: str
    name: str
    host: str
    grammars: Grammars
    turns: Turns
    step_us_max: int
    """The longest that a step may take."""
    stream_ms: int
    """Least time between two reports of a run, unless it ends or others wait for the cores."""
    admit: Callable[[Input], None]
    """Put an input into the actor's own inbox."""
    on_pool: Callable[[int], None]
    """Steps can now run over a pool with this many pages; 0: over none, until another is mapped."""
    on_state: Callable[[], None]
    """The core's readiness or load has changed."""
    on_drained: Callable[[], None]
    on_patience: Callable[[], None]
    """The core may want its next tick sooner."""
    on_hung: Callable[[], None]
    """A step has hung, and with it whatever waits for its thread."""


class WorkerBehaviour(Behaviour[Input]):
    """Feeds the core and performs what it commands, in order."""

    def __init__(
        self,
        around: Surroundings,
        core: WorkerCore,
        executor: PoolingExecutor,
        spans: SequenceSpans,
    ) -> None:
        self._around = around
        self._core = core
        self._spans = spans
        self._calls: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, Delivery] = {}
        """Deliveries that the core has not answered yet, by their number in the core."""
        self._next_delivery = 1
        self._heard = False
        """The core has taken events since the last ``go_on``."""
        self._was_ready = False
        self._told, self._told_us = Load(), 0
        self.stepper = Stepper(
            executor,
            turns=around.turns,
            step_us_max=around.step_us_max,
            on_steps=around.admit,
            on_crash=lambda error: around.admit(Crashed(error)),
            on_pool_missing=self._pool_missing,
            clock=around.clock,
            stream_ms=around.stream_ms,
            on_pool=self._pool_mapped,
        )
        self._pool: SessionOpened | None = None
        """The one to be used."""
        self._refused_why = ""
        """Why the pager refuses a pool, as last logged."""
        self._turned_away = TurnedAway(around.host)
        self._preemptions = Preemptions()
        self._gate = GrammarGate(around.grammars, around.admit, self._track)

    async def handle(self, event: Input) -> None:
        """Raises whatever crashed the core or the step thread, and ``ConfigError`` when there can
        never be a pool."""
        around = self._around
        match event:
            case Delivery():
                self._received(event)
            case Compiled():
                self._received(event.delivery, event.came_us)
            case Crashed() | PoolRefused():
                raise event.error
            case PoolDiscarded():
                self.stepper.let_go_discarded()
            case StepsDone():
                self._steps_done(event)
            case _:
                self._feed(event)
        if isinstance(event, Tick):
            self._tell_load()
            if self.stepper.is_hung():
                around.on_hung()
        if self._core.ready != self._was_ready:
            self._was_ready = self._core.ready
            around.on_state()

    def _tell_load(self) -> None:
        """Announce a load that has changed a few times a second, not at every tick."""
        now_us, load = self._around.clock.now_us(), self._core.load
        measures.loaded(load)
        if load != self._told and now_us - self._told_us >= _LOAD_PERIOD_US:
            self._told, self._told_us = load, now_us
            self._around.on_state()

    def _use_pool(self, opened: SessionOpened) -> None:
        self._pool, self._refused_why = opened, ""
        self._around.on_pool(0)
        self.stepper.use_pool(opened)

    def _pool_mapped(self, opened: SessionOpened) -> None:
        if opened is self._pool:  # otherwise another was named meanwhile
            self._around.on_pool(opened.page_count)

    def _pool_missing(self, opened: SessionOpened) -> None:
        if opened is self._pool:
            self._around.on_pool(0)
        _log.warning(
            "worker.pool_missing", path=opened.pool_path, next="the worker asks the pager again"
        )
        self._around.admit(PoolMissing(opened.pool_incarnation))

    async def end(self) -> None:
        """Give up open calls and begin no further step. The owner closes ``stepper``: it knows how
        long the running step may be waited for."""
        self.stepper.stop()
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _received(self, delivery: Delivery, came_us: int | None = None) -> None:
        """``came_us``: when it came, if it has waited for its grammar."""
        at_us = self._around.clock.now_us() if came_us is None else came_us
        try:
            message = codec.decode(delivery.data)
            self._check_place(message, delivery.subject)
            vet(
                message,
                vocab_tokens=self._around.grammars.vocab_tokens,
                message_bytes_max=self._around.bus.message_bytes_max,
                output_bytes_max=self._around.bus.config.output_bytes_max,
            )
        except Fault as fault:
            delivery.respond_error(fault)
            return
        if isinstance(message, Submit | Attach):
            grammar = message.sampling.grammar
            if came_us is None and self._gate.holds(delivery, grammar, at_us):
                return
            if came_us is not None and isinstance(message, Submit):
                # Its pages came while nobody expected it.
                message = msgspec.structs.replace(message, asked_as=None)
            context = trace.accept(delivery.headers)
            self._spans.begin(keys_of(message), context, at_us)
        elif isinstance(message, Granted):
            self._spans.granted_unasked(message, at_us)
        elif isinstance(message, Extended):
            self._spans.extended_unasked(message, at_us)
        call = None
        if delivery.reply:
            call = self._next_delivery
            self._next_delivery += 1
            self._waiting[call] = delivery
        self._feed(Received(call, message), message)
        if isinstance(message, Submit | Attach):
            # A sequence that is submitted again may have ended: nothing would end its span.
            self._spans.drop(key for key in keys_of(message) if not self._core.lives(key))

    def _track(self, task: asyncio.Task[None]) -> None:
        self._calls.add(task)
        task.add_done_callback(self._call_ended)

    def _check_place(self, message: Message, subject: str) -> None:
        """Inspection has a subject of its own, for users who may do nothing else. Raises
        ``Malformed`` for a message on the wrong subject."""
        looks = isinstance(message, InspectWorker)
        if looks != (subject == subjects.worker_report(self._around.name)):
            raise Malformed(
                "only InspectWorker may be sent to a worker's inspect subject, and only there"
            )

    def rest(self) -> None:
        if self._heard:
            self._go_on()

    def _feed(self, event: Event, asked: Message | None = None) -> None:
        self._heard = True
        self._perform_all(self._core.take(event, self._around.clock.now_us() / 1_000), asked)

    def _steps_done(self, event: StepsDone) -> None:
        """Frames with first tokens are sent before spans are updated, if they are the first
        commands. All other commands may end spans, so they come after the update, and so do
        frames that must follow a release of pages."""
        at_us = self._around.clock.now_us()
        results = tuple(result for _, result in event.steps)
        finished = StepsFinished(results, event.goes_on, event.readers)
        commands = self._core.take(finished, at_us / 1_000)
        first = list(takewhile(lambda command: isinstance(command, SendFrames), commands))
        with self._around.bus.together():
            for command in first:
                self._perform(command)
            self._spans.steps_ended(event.steps, at_us)
            for command in commands[len(first) :]:
                self._perform(command)
        self._go_on()
        measures.steps_ended(event.steps)

    def _go_on(self) -> None:
        """Called at once after a step; otherwise once all events that came together were taken,
        so that sequences admitted together are computed together."""
        self._heard = False
        self._perform_all(self._core.go_on())
        self._around.on_patience()

    def _perform_all(self, commands: Iterable[Command], asked: Message | None = None) -> None:
        with self._around.bus.together():
            for command in commands:
                self._perform(command, asked)

    def _perform(self, command: Command, asked: Message | None = None) -> None:
        around, at_us = self._around, self._around.clock.now_us()
        match command:
            case Answer():
                if isinstance(command.message, Refused) and isinstance(asked, Submit | Attach):
                    self._spans.drop(keys_of(asked))
                delivery = self._waiting.pop(command.call)
                answer = command.message
                if isinstance(answer, WorkerReport):
                    answer = self._spans.with_traces(answer)
                rpc.answer(delivery, answer)
            case CallPager():
                self._call(subjects.pager(around.host), command)
            case CallWorker():
                self._call(subjects.worker(command.worker), command)
            case SendFrames():
                self._send_frames(command)
            case RunStep():
                self.stepper.run(command.plan)
                self._spans.step_began(command.plan, at_us)
            case EndRun():
                self.stepper.end_run()
            case UsePool():
                self._use_pool(command.opened)
            case Preempted():
                measures.preempted(command)
                self._spans.preempted(command.key, command.reason, command.lost_tokens, at_us)
                self._preemptions.heard(command, at_us)
            case Finished():
                measures.sequence_ended(command.facts)
                self._spans.end(command.key, command.facts, at_us)
            case Drained():
                around.on_drained()

    def _send_frames(self, command: SendFrames) -> None:
        try:
            rpc.send(self._around.bus, subjects.gateway(command.gateway), command.frames)
        except Fault as fault:
            # The gateway sees the gap in the counter, or silence, and asks again.
            _log.debug("worker.frames_lost", gateway=command.gateway, code=fault.code)

    def _call(self, subject: str, command: CallPager | CallWorker) -> None:
        """Send the call at once. The answer, which may be a refusal, comes into the inbox."""
        around, message = self._around, self._spans.declared(command.message)
        span = self._spans.call(message, around.clock.now_us())
        headers = {trace.TRACEPARENT: span.context.traceparent} if span is not None else None
        try:
            reply = around.bus.ask(
                subject, codec.encode(message), timeout_ms=command.timeout_ms, headers=headers
            )
        except Fault as fault:
            self._answered(command, span, Refused.of(fault))
            return
        self._track(asyncio.create_task(self._hear(reply, command, span), name="worker-call"))

    def _call_ended(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._around.admit(Crashed(error))

    async def _hear(
        self, reply: Awaitable[Reply], command: CallPager | CallWorker, span: OpenCall | None
    ) -> None:
        try:
            answer = codec.decode((await reply).data)
        except Fault as fault:
            answer = Refused.of(fault)
        self._answered(command, span, answer)

    def _answered(
        self, command: CallPager | CallWorker, span: OpenCall | None, answer: Message
    ) -> None:
        around = self._around
        match command.message, answer:
            case OpenSession(), Refused(code="NoCapacity", retry_after_ms=0):
                self._pool_refused(answer.message)
            case OpenSession(), _:
                self._turned_away.heard(answer, around.clock.now_us())
        if span is not None:
            self._spans.answered(span, answer, around.clock.now_us())
        if isinstance(command, CallPager):
            around.admit(PagerAnswered(command.call_id, answer))
        else:
            around.admit(PeerAnswered(command.call_id, answer))

    def _pool_refused(self, why: str) -> None:
        """Settings are wrong only if there never was a pool. If they were good for an earlier one,
        others have filled a device or a disk since, and may free it again."""
        if self._pool is None:
            self._around.admit(PoolRefused(ConfigError(why)))
        elif why != self._refused_why:
            self._refused_why = why
            _log.error("worker.pool_refused", error=why, next="the worker asks the pager again")
