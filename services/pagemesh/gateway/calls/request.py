"""The life of one request: what was delivered, what is under way, what to do next.

    OPEN -> COMPLETED   every choice ended by a stop or its length
         -> FAILED      no other attempt can help, or its deadline passed
         -> CANCELLED   the client left or reads too slowly, or the gateway stops

Each choice has states of its own (``choice``). An attempt is one ``Submit`` of one or more choices;
a choice whose attempt was refused, was lost or fell silent goes into the next one, with the tokens
already delivered. Those never change: repeated tokens are dropped, missing ones are asked for
again, and a worker that keeps sending frames of an older attempt is told to stop.

Pure: time is an argument, ``due_ms`` says when a ``Tick`` is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pagemesh.gateway.calls import deliveries, outgoing
from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.choice import Choice, ChoiceState, ChoiceText, next_ms
from pagemesh.gateway.calls.events import Worker
from pagemesh.gateway.calls.spec import ATTEMPT_MAX, RequestLimits, RequestSpec, Usage, mendable
from pagemesh.wire.errors import Busy, DeadlineExceeded, Fault, Gone, Internal, fault
from pagemesh.wire.messages import Ok, Refused, SequenceKey
from pagemesh.wire.work_messages import AbortReason, Accepted, Frame, Hypothesis


class RequestCore:
    """``handle`` takes one event and returns what is to be done, in order."""

    def __init__(
        self, spec: RequestSpec, limits: RequestLimits, texts: Sequence[ChoiceText], now_ms: int
    ) -> None:
        if len(texts) != spec.choice_count:
            raise ValueError(f"{spec.choice_count} choices take as many texts, got {len(texts)}")
        self.spec = spec
        self._limits = limits
        self._texts = texts
        self.choices = [Choice(i, texts[i], now_ms) for i in range(spec.sequence_count)]
        """Read-only for others. A beam search is one choice here, however many it returns."""
        self.routes: dict[int, ev.Route] = {}  # by attempt, for placed choices
        self.elsewhere_tokens = 0  # cached on another host than that of the first attempt
        self._attempt = 0
        self._waiting_since_ms: int | None = None
        self._model_root: bytes | None = None
        self._prompt_scored = not spec.prompt_logprobs
        self._outcome: ev.Completed | ev.Failed | ev.Cancelled | None = None
        self._out: list[ev.Command] = []

    @property
    def ended(self) -> bool:
        return self._outcome is not None

    @property
    def attempt_count(self) -> int:
        return self._attempt

    @property
    def due_ms(self) -> int:
        """When to send a ``Tick``, if nothing happens before."""
        return next_ms(self.choices, self.spec.deadline_ms)

    @property
    def usage(self) -> Usage:
        """``cached_tokens`` is what the first admission of the prompt found in the cache."""
        return Usage.of(self.spec, self.choices)

    def handle(self, event: ev.Event, now_ms: int) -> list[ev.Command]:
        """Raises ``AssertionError`` for an event the caller may not send (``Routed`` or
        ``Unroutable`` without a ``ChooseRoute``). After the end every event is ignored."""
        if self.ended:
            return []
        self._out = []
        match event:
            case ev.FrameArrived(worker, frame):  # first: the most frequent event
                self._frame_arrived(worker, frame, now_ms)
            case ev.Begin() | ev.Tick():
                pass
            case ev.Routed(route):
                self._routed(route, now_ms)
            case ev.Unroutable(reason, expected):
                self._unroutable(reason, expected, now_ms)
            case ev.SubmitAnswered(attempt, _, answer):
                self._submit_answered(attempt, answer, now_ms)
            case ev.ResendAnswered(key, worker, answer):
                self._resend_answered(key, worker, answer, now_ms)
            case ev.FramesMissed(worker):
                for choice in self._on(worker):
                    self._missed(choice, worker, now_ms)
            case ev.WorkerLost(worker):
                self._worker_lost(worker, now_ms)
            case ev.ClientGone(why):
                self._abort([c for c in self.choices if c.live], "client")
                self._end(ev.Cancelled(why))
        self._settle(now_ms)
        return self._out

    def check(self) -> None:
        """Raises ``AssertionError`` when an invariant is broken."""
        for choice in self.choices:
            assert choice.used_count <= choice.token_count, choice.index
            assert not choice.placed or choice.attempt in self.routes, choice.index
            assert choice.attempt <= self._attempt, choice.index
            assert not self.ended or not choice.live, choice.index
        alive = any(choice.live for choice in self.choices)
        assert self.ended or alive or not self.choices, "all choices ended, the request did not"

    # Placing --------------------------------------------------------------------------------

    def _settle(self, now_ms: int) -> None:
        """What follows from the state and the time, whatever the event was."""
        if self.ended:
            return
        if now_ms >= self.spec.deadline_ms:
            self._fail(DeadlineExceeded("the request's deadline passed"), "deadline")
            return
        if next_ms(self.choices, now_ms + 1) <= now_ms:
            for choice in self.choices:
                if choice.placed and choice.due_ms <= now_ms:
                    choice.due_ms = now_ms + self._limits.silence_ms_max
                    self._ask(choice, self._candidates(choice))
            self._launch(now_ms)
        if all(choice.state is ChoiceState.DONE for choice in self.choices):
            self._end(ev.Completed())

    def _launch(self, now_ms: int) -> None:
        """Have due choices routed for a new attempt, all of them if one message can carry them."""
        due = (c for c in self._in(ChoiceState.WAITING) if c.due_ms <= now_ms)
        group = outgoing.together(self.spec, due)
        if not group or self._in(ChoiceState.ROUTING):
            return
        for choice in group:
            choice.move(ChoiceState.ROUTING, "due")
        # Other choices may deliver at any moment, and one answer is of one set of weights.
        under_way = (self.routes[c.attempt].model_root for c in self.choices if c.placed)
        model_root = self._model_root or next(under_way, None)
        self._out.append(outgoing.choose(self.spec, group, model_root))

    def _routed(self, route: ev.Route, now_ms: int) -> None:
        group = self._in(ChoiceState.ROUTING)
        assert group, "Routed without a ChooseRoute"
        if self._attempt >= ATTEMPT_MAX:
            self._fail(Internal("too many attempts"), "error")
            return
        self._waiting_since_ms = None
        self._attempt += 1
        self.routes[self._attempt] = route
        if self._attempt == 1:
            self.elsewhere_tokens = route.elsewhere_tokens
        for choice in group:
            choice.submitted(self._attempt)
            choice.heard(now_ms, self._limits.submit_timeout_ms + self._limits.silence_ms_max)
        live = {choice.attempt for choice in self.choices if choice.placed}
        self.routes = {n: kept for n, kept in self.routes.items() if n in live}
        left_ms = self._left_ms(now_ms)
        self._out.append(outgoing.submit(
            self.spec, route, group, self._attempt, left_ms, scored=self._prompt_scored,
            timeout_ms=min(self._limits.submit_timeout_ms, left_ms),
        ))  # fmt: skip

    def _unroutable(self, reason: Fault, expected: bool, now_ms: int) -> None:
        group = self._in(ChoiceState.ROUTING)
        assert group, "Unroutable without a ChooseRoute"
        since_ms = now_ms if self._waiting_since_ms is None else self._waiting_since_ms
        self._waiting_since_ms, limits = since_ms, self._limits
        wait_ms_max = limits.wait_ms_max(reason, patient=expected or self._attempt > 0)
        if not mendable(reason) or now_ms - since_ms >= wait_ms_max:
            self._fail(reason, "error")
            return
        for choice in group:
            choice.avoid.clear()
            choice.due_ms = now_ms + 4 * limits.backoff_ms
            choice.move(ChoiceState.WAITING, "no worker to take it")

    def _submit_answered(self, attempt: int, answer: Accepted | Refused, now_ms: int) -> None:
        group = [c for c in self._in(ChoiceState.SUBMITTED) if c.attempt == attempt]
        if isinstance(answer, Refused):
            self._attempt_failed(group, answer.error(), now_ms)
            return
        for choice in group:
            choice.move(ChoiceState.RUNNING, "accepted")
            choice.heard(now_ms, self._limits.silence_ms_max)

    # Frames ---------------------------------------------------------------------------------

    def _frame_arrived(self, worker: Worker, frame: Frame, now_ms: int) -> None:
        key = frame.key
        if key.request != self.spec.request or key.choice >= len(self.choices):
            return
        choice = self.choices[key.choice]
        if not choice.placed or choice.attempt != key.attempt:
            is_last = frame.finish is not None or frame.error is not None
            if not is_last and choice.overheard(key.attempt, now_ms):
                self._out.append(ev.SendAbort(worker, outgoing.stop(key)))
            return
        if choice.state is ChoiceState.SUBMITTED:
            choice.move(ChoiceState.RUNNING, "frame")
        choice.holder = worker
        choice.heard(now_ms, self._limits.silence_ms_max)
        if frame.waterfall is not None and choice.waterfall is None:
            choice.waterfall = frame.waterfall
            choice.computed_tokens = frame.computed_tokens
        if frame.error is not None:
            error = fault(frame.error.code, frame.error.message)
            self._attempt_failed([choice], error, now_ms)
        elif len(frame.tokens) % 4 or frame.finish in ("error", "abort"):
            reason = Gone("the worker gave up the sequence")
            self._attempt_failed([choice], reason, now_ms)
        elif frame.hypotheses is not None:
            self._searched(choice, frame.hypotheses, now_ms)
        elif frame.first_position > choice.token_count or (
            not self._prompt_scored and frame.prompt_logprobs is None  # the first frame has them
        ):
            self._gap(choice, worker, now_ms)
        else:
            self._take(choice, frame)

    def _missed(self, choice: Choice, worker: Worker, now_ms: int) -> None:
        """Ask for lost frames now, or a bit later if just done: one loss must not breed others."""
        again_ms = now_ms
        if choice.resend_ms is not None:
            again_ms = choice.resend_ms + self._limits.gap_patience_ms
        if again_ms > now_ms:
            choice.due_ms = min(choice.due_ms, again_ms)
        else:
            choice.resend_ms = now_ms
            self._ask(choice, [worker])

    def _gap(self, choice: Choice, worker: Worker, now_ms: int) -> None:
        asked_ms = choice.resend_ms
        if asked_ms is not None and now_ms - asked_ms < self._limits.gap_patience_ms:
            return
        choice.resend_ms = now_ms
        choice.resend_count += 1
        if choice.resend_count > self._limits.resends_max:
            self._attempt_failed([choice], Internal("lost frames were not resent"), now_ms)
        else:
            first = [] if self._prompt_scored else [self.routes[choice.attempt].worker]
            self._ask(choice, dict.fromkeys([*first, worker]))

    def _take(self, choice: Choice, frame: Frame) -> None:
        """Apply a frame that starts at or before the next wanted position."""
        first = choice.token_count
        skip = first - frame.first_position
        fresh = frame.tokens[4 * skip :]
        if frame.prompt_logprobs is not None and not self._prompt_scored:
            self._prompt_scored = True
            self._out.append(ev.PromptScored(frame.prompt_logprobs))
        stop: str | None = None
        if fresh:
            choice.generated += fresh
            choice.failure_count = choice.resend_count = 0
            choice.resend_ms = None
            choice.avoid.clear()
            route = self.routes[choice.attempt]
            self._model_root = route.model_root
            stop = self._deliver(choice, frame, first, skip)
        if stop is not None:
            if frame.finish is None:
                self._abort([choice], "stop")
            self._choice_ended(choice, "stop", stop)
        elif frame.finish == "stop" and 4 * skip <= len(frame.tokens):
            self._choice_ended(choice, "stop", deliveries.own_stop(self.spec, frame.stop_token))
        elif frame.finish == "length" and 4 * skip <= len(frame.tokens):
            self._choice_ended(choice, "length", None)

    def _deliver(self, choice: Choice, frame: Frame, first: int, skip: int) -> str | None:
        """Deliver new tokens; returns the stop string that they completed, if any."""
        delivery, stop = deliveries.of_frame(self.spec, choice, frame, first, skip)
        choice.used_count += len(delivery.tokens)
        self._out.append(delivery)
        return stop

    def _searched(self, choice: Choice, found: list[Hypothesis], now_ms: int) -> None:
        if len(found) != self.spec.choice_count or any(len(one.tokens) % 4 for one in found):
            self._attempt_failed([choice], Internal("the beam search is incomplete"), now_ms)
            return
        answer = deliveries.search_answer(self.spec, self._texts, found)
        choice.generated = bytearray().join(one.tokens for one in found)
        choice.used_count = sum(len(one.tokens) for one in answer if isinstance(one, ev.Deliver))
        choice.move(ChoiceState.DONE, "search")
        self._out += answer

    def _choice_ended(
        self, choice: Choice, finish: Literal["stop", "length"], reason: ev.StopReason
    ) -> None:
        choice.move(ChoiceState.DONE, finish)
        self._out.append(ev.ChoiceEnded(choice.index, finish, reason, choice.text.close()))

    # Trouble --------------------------------------------------------------------------------

    def _on(self, worker: Worker) -> list[Choice]:
        """Choices that ``worker`` holds or may hold."""
        return [c for c in self.choices if c.placed and worker in self._candidates(c)]

    def _candidates(self, choice: Choice) -> list[Worker]:
        """The workers that may know the choice, the likeliest first."""
        route = self.routes[choice.attempt]
        found = [w for w in (choice.holder, route.decode, route.worker) if w is not None]
        return list(dict.fromkeys(found))

    def _ask(self, choice: Choice, workers: Iterable[Worker]) -> None:
        """Ask for everything from the next wanted position on; the answer also tells
        whether the choice is still known."""
        message = outgoing.resend(self.spec, choice)
        for worker in workers:
            choice.probes[worker] = False
            self._out.append(ev.SendResend(worker, message, self._limits.resend_timeout_ms))

    def _resend_answered(
        self, key: SequenceKey, worker: Worker, answer: Ok | Refused, now_ms: int
    ) -> None:
        choice = self.choices[key.choice]
        if not choice.placed or choice.attempt != key.attempt or worker not in choice.probes:
            return
        if isinstance(answer, Ok) or isinstance(answer.error(), Busy):
            # A worker that is too busy to look may still have the choice.
            choice.heard(now_ms, self._limits.silence_ms_max)
            return
        choice.probes[worker] = True
        if not all(choice.probes.values()):
            return
        others = [w for w in self._candidates(choice) if w not in choice.probes]
        if others:
            self._ask(choice, others)
        else:
            self._attempt_failed([choice], Gone("no worker knows the sequence"), now_ms)

    def _worker_lost(self, worker: Worker, now_ms: int) -> None:
        failed: list[Choice] = []
        for choice in self._on(worker):
            route = self.routes[choice.attempt]
            if worker == (choice.holder or route.worker):
                failed.append(choice)
            else:  # perhaps just handed over: the others must say whether they have it
                self._ask(choice, [w for w in self._candidates(choice) if w != worker])
        self._attempt_failed(failed, Gone("the worker is gone"), now_ms, lost=worker)

    def _attempt_failed(
        self, group: list[Choice], error: Fault, now_ms: int, lost: Worker | None = None
    ) -> None:
        """Try ``group`` again later, or fail the request when that cannot help."""
        limits = self._limits
        if not group:
            return
        if not mendable(error) or any(c.failure_count >= limits.failures_max for c in group):
            self._fail(error, "error")
            return
        self._abort(group, "superseded", lost)
        for choice in group:
            choice.avoid.add(choice.holder or self.routes[choice.attempt].worker)
            choice.probes.clear()
            pause_ms = min(limits.backoff_ms << choice.failure_count, limits.backoff_ms_max)
            choice.failed(error.code)
            choice.move(ChoiceState.WAITING, error.code)
            choice.due_ms = now_ms + max(pause_ms, min(error.retry_after_ms, 1_000))
            self._end_if_over(choice)

    def _end_if_over(self, choice: Choice) -> None:
        """End a choice that has all its tokens and lost only its last frame."""
        sampling = self.spec.sampling
        count = choice.token_count
        last = int.from_bytes(choice.generated[-4:], "little") if count else None
        if count > sampling.min_tokens and last in sampling.stop_tokens:
            self._choice_ended(choice, "stop", deliveries.own_stop(self.spec, last))
        elif count >= sampling.max_tokens and self._prompt_scored:
            self._choice_ended(choice, "length", None)

    def _abort(self, group: list[Choice], reason: AbortReason, lost: Worker | None = None) -> None:
        """Tell every worker that may hold one of ``group`` to stop."""
        live_count = sum(choice.live for choice in self.choices)
        whole = self._attempt if len(group) == live_count else None
        sent: set[Worker] = set()
        for choice in group:
            workers = self._candidates(choice) if choice.placed else []
            for worker in workers:
                if worker != lost and worker not in sent:
                    message = outgoing.abort(self.spec, choice, reason, whole)
                    self._out.append(ev.SendAbort(worker, message))
                    if whole is not None:
                        sent.add(worker)

    def _fail(self, error: Fault, reason: AbortReason) -> None:
        self._abort([c for c in self.choices if c.live], reason)
        self._end(ev.Failed(error))

    def _end(self, outcome: ev.Completed | ev.Failed | ev.Cancelled) -> None:
        for choice in self.choices:
            if choice.live:
                choice.move(ChoiceState.DONE, type(outcome).__name__)
        self._outcome = outcome
        self._out.append(ev.Ended(outcome))

    def _in(self, state: ChoiceState) -> list[Choice]:
        return [choice for choice in self.choices if choice.state is state]

    def _left_ms(self, now_ms: int) -> int:
        return max(1, min(self.spec.deadline_ms - now_ms, 86_400_000))
