"""A prefill or decode worker as a simulated process: it acts like the real actor, with the real
core."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

from tests.sim import model
from tests.sim.bugs import Bugs
from tests.sim.executor import Running
from tests.sim.growths import MODEL
from tests.sim.host import Host
from tests.sim.world import Network, Process, Reply, World

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker.core import WorkerCore
from pagemesh.engine.worker.intake import Intake
from pagemesh.engine.worker.plan import StepPlan, StepResult, StepRow, plan_after
from pagemesh.engine.worker.sequence import Sequence
from pagemesh.engine.worker.settings import RoleSettings, WorkerIdentity, WorkerLimits
from pagemesh.wire.messages import Message
from pagemesh.wire.pager_messages import PoolSpec
from pagemesh.wire.work_messages import Attach, Frames, Submit

_TOKEN_MS = 0.1
"""What a token adds to a step: enough for prompts to be chunked while other sequences decode."""
_GATHERED = 0.5
"""Share of a run's steps whose results are reported with those of the next."""
_LATE_REPORTS = 0.2
"""Share of reports that reach the event loop late, while the next step runs."""
_BUSY = 0.2
"""Share of events after which others are in the inbox already, to be handled before the next
step."""
_BUSY_MS = 2.0


class _BelievesAnyAsker(WorkerCore):
    """Planted bug: see ``Bugs``."""

    def _was_asked_for(self, sequence: Sequence, message: Submit | Attach) -> bool:
        if not isinstance(message, Submit) or message.asked_as is None:
            return False
        return sequence.key.choice == message.choices[0].choice


class _TakesAnyWeights(Intake):
    """Planted bug: see ``Bugs``."""

    def _require_same_weights(self, message: Submit | Attach) -> None:
        pass


class WorkerNode(Process):
    def __init__(
        self,
        world: World,
        network: Network,
        host: Host,
        name: str,
        role: RoleSettings,
        limits: WorkerLimits,
        spec: PoolSpec,
        bugs: Bugs,
    ) -> None:
        super().__init__(world, name)
        self.host = host
        self.role = role
        self.core: WorkerCore | None = None
        self.incarnation = 0
        self.weights = 0
        """The version of the model it serves in this life."""
        self.step_ms = 4.0
        self.steps_count = 0
        self.preempted_count = 0
        self._network = network
        self._limits = limits
        self._spec = spec
        self._bugs = bugs
        self._calls: dict[int, Reply] = {}
        self._next_call = 0
        self._will_go_on = False
        self._end_run = False
        self._reports: deque[ev.StepsFinished] = deque()
        self._results: list[StepResult] = []
        self._seen: set[tuple[int, int]] = set()
        self._ticked_ms = 0.0
        self._pool_incarnation = 0
        network.serve(self, self._received)

    def start(self) -> None:
        self.begin()
        self.incarnation = self.host.new_incarnation(self)
        lock_name = f"{self.name}-{self.incarnation}"
        self.weights = self.host.weights
        identity = WorkerIdentity(
            self.name, self.incarnation, lock_name, self._spec,
            model.model_root(self.weights), MODEL,
        )  # fmt: skip
        core = _BelievesAnyAsker if self._bugs.believe_any_asker else WorkerCore
        self.core = core(identity, self.role, self._limits, self._make_ticket)
        if self._bugs.take_any_weights:
            self.core._intake = _TakesAnyWeights(self.core._desk)
        self._will_go_on = False
        self._calls.clear()
        self._seen.clear()
        self._reports.clear()
        self._results.clear()
        self._ticked_ms = -math.inf
        self._tick()

    def stop(self) -> None:
        """Die at once, as by SIGKILL: the kernel frees the lock."""
        self.kill()
        self.core = None
        self.host.died(self.incarnation)

    def drain(self, grace_ms: int) -> None:
        """Drain as after SIGTERM: it ends when nothing is left, and is started again."""
        self.handle(ev.Drain(grace_ms))

    def handle(self, event: ev.Event) -> None:
        """Feed the core and perform its commands in order, as the actor does."""
        core = self.core
        assert core is not None
        if not isinstance(event, ev.Tick):
            self.world.note(self.name, "event", event)
        for command in core.take(event, self.world.now):
            self._perform(command)
        core.check()
        if isinstance(event, ev.StepsFinished):
            self._go_on()
        elif not self._will_go_on:
            self._will_go_on = True
            is_busy = self.world.random.random() < _BUSY
            self.at(is_busy * self.world.random.random() * _BUSY_MS, self._go_on)

    def _go_on(self) -> None:
        core = self.core
        assert core is not None
        self._will_go_on = False
        for command in core.go_on():
            self._perform(command)
        core.check()

    def _make_ticket(self) -> str:
        return f"{self.world.random.getrandbits(128):032x}"

    def _tick(self) -> None:
        assert self.core is not None
        if self.world.now - self._ticked_ms >= self.core.patience_ms:
            self._ticked_ms = self.world.now
            self.handle(ev.Tick())
        self.at(self._limits.tick_ms, self._tick)

    def _received(self, reply: Reply | None, message: Message) -> None:
        call: int | None = None
        if reply is not None:
            self._next_call += 1
            call = self._next_call
            self._calls[call] = reply
        if isinstance(message, Submit | Attach):
            self.host.note_root(message)
        self.handle(ev.Received(call, message))

    def _perform(self, command: ev.Command) -> None:
        if not isinstance(command, ev.SendFrames) or command.frames.frames:
            self.world.note(self.name, "command", command)
        match command:
            case ev.Answer():
                self._calls.pop(command.call)(command.message)
            case ev.CallPager():
                self._call(command.call_id, self.host.pager_name, command, ev.PagerAnswered)
            case ev.CallWorker():
                self._call(command.call_id, command.worker, command, ev.PeerAnswered)
            case ev.SendFrames():
                self._note_drawn(command.frames)
                self._network.send(self, command.gateway, command.frames)
            case ev.RunStep():
                self._end_run = False
                self._run(command.plan)
            case ev.EndRun():
                self._end_run = True
            case ev.UsePool():
                self._pool_incarnation = command.opened.pool_incarnation
                self._seen.clear()
            case ev.Preempted():
                self.preempted_count += 1
            case ev.Drained():
                self.at(0.0, lambda: self.host.restart(self))
            case ev.Finished():
                pass

    def _note_drawn(self, frames: Frames) -> None:
        """Check that no two workers continue one attempt: they could mix two answers, which the
        model's values would not show."""
        assert self.core is not None
        for frame in frames.frames:
            sequence = self.core._desk.sequences[frame.key]
            first = max(frame.first_position, sequence.start_count)
            for position in range(first, frame.first_position + len(frame.tokens) // 4):
                drawer = self.host.drawers.setdefault((frame.key, position), self.incarnation)
                self.world.expect(
                    drawer == self.incarnation, f"{frame.key}: two drew position {position}"
                )

    def _call(
        self,
        call_id: int,
        target: str,
        command: ev.CallPager | ev.CallWorker,
        answer: type[ev.PagerAnswered] | type[ev.PeerAnswered],
    ) -> None:
        def answered(message: Message) -> None:
            self.handle(answer(call_id, message))

        self._network.call(self, target, command.message, command.timeout_ms, answered)

    def _run(self, plan: StepPlan) -> None:
        self.steps_count += 1
        memory = self.host.memory_of(self._pool_incarnation)
        running = Running.launch(
            plan,
            memory,
            self.incarnation,
            self.weights,
            self._root_of,
            self._seen,
            fence_after=not self._bugs.skip_second_fence,
        )
        dice = self.world.random
        tokens_count = sum(len(row.tokens) for row in plan.rows)
        work_ms = 1.0 + 0.1 * len(plan.rows) + _TOKEN_MS * tokens_count
        span = self.slowness * (work_ms + self.step_ms * dice.random())
        middle = span * dice.random()

        def compute() -> None:
            running.compute()
            self.at(span - middle, finish)

        def finish() -> None:
            result = replace(running.finish(), took_us=(int(1_000 * span),))
            # Whatever the executor reports, nothing is published under a lease that has ended.
            for row, outcome in zip(plan.rows, result.rows, strict=True):
                stands = memory.words.get(row.lease_slot, 0) == row.lease
                self.world.expect(
                    stands or outcome.revoked, f"{row.key}: published after its lease ended"
                )
            following = None if self._end_run else plan_after(plan, result)
            # The step thread continues without waiting for the event loop.
            if following is not None:
                self._run(following)
            self._report(result, goes_on=following is not None)

        self.at(middle, compute)

    def _report(self, result: StepResult, *, goes_on: bool) -> None:
        """Report results to the core, in order and after a delay; those of a run in groups."""
        dice = self.world.random
        self._results.append(result)
        if goes_on and dice.random() < _GATHERED:
            return
        delay_ms = dice.random() * self.step_ms if dice.random() < _LATE_REPORTS else 0.0
        self._reports.append(ev.StepsFinished(tuple(self._results), goes_on))
        self._results.clear()
        self.at(delay_ms, lambda: self.handle(self._reports.popleft()))

    def _root_of(self, row: StepRow) -> bytes:
        assert self.core is not None
        return self.host.root_of(row.key)
