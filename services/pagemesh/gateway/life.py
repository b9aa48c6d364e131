"""One request's I/O: performs its core's commands and feeds the outcomes back.

A life has no task of its own while it waits: frames, answers and timers feed the core on the event
loop, and events for the client go into an ``Outbox`` that the door reads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from pagemesh.gateway import measures
from pagemesh.gateway.api.api_errors import from_fault
from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.events import Worker
from pagemesh.gateway.calls.request import RequestCore
from pagemesh.gateway.outbox import Outbox
from pagemesh.gateway.routing.router import Router
from pagemesh.runtime import rpc, semconv, trace
from pagemesh.runtime.bus import Asked, Bus, BusState, Outgoing
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.runtime.logs import get_logger
from pagemesh.runtime.spans import record_span
from pagemesh.runtime.trace import TraceContext
from pagemesh.wire import codec, subjects
from pagemesh.wire.errors import (
    Absent,
    Busy,
    DeadlineExceeded,
    Disconnected,
    Fault,
    Gone,
    Internal,
    Stale,
)
from pagemesh.wire.messages import Ok, Refused
from pagemesh.wire.work_messages import Accepted

_ABORT_TRIES_MAX = 3
ABORT_TIMEOUT_MS = 1_000
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a life needs of its gateway."""

    bus: Bus
    clock: MonotonicClock
    router: Router
    spawn: Callable[[Coroutine[Any, Any, None], str], None]
    """Run a coroutine that does not raise, as a named child of the gateway's group."""
    forget: Callable[[str], None]
    """Report that the request with this id has ended."""
    absent: Callable[[Worker], None]
    """Report that nobody listens on this worker's subject."""
    expected: Callable[[], bool]
    """Whether a worker is probably on its way back."""
    given: Callable[[ev.Route], None]
    """Report that work was sent to the workers of this route."""


@dataclass(slots=True)
class _Search:
    """The search for a route: one span, though it is tried ten times a second while no worker is
    there. A span for each try would bury the rest of this trace, and other traces."""

    start_us: int
    why: dict[str, str]
    """Of a further attempt: what ended the one before, and the workers that are avoided for it."""
    tries: int = 0
    error: str = ""
    found: dict[str, str | int] | None = None
    """What the span says of the route, as of ``end_us``; recorded once the ``Submit`` is out."""
    end_us: int = 0


class Life:
    """Driven by ``feed``; it ends by putting ``Ended`` into the outbox."""

    def __init__(
        self,
        around: Surroundings,
        core: RequestCore,
        outbox: Outbox,
        *,
        prompt_index: int,
        model: str,
        salt: bytes,
        context: TraceContext,
    ) -> None:
        self.core = core
        self._around = around
        self._outbox = outbox
        self._prompt_index = prompt_index
        self._model = model
        self._salt = salt
        self._context = context
        self._queue: deque[ev.Event] = deque()
        self._feeding = False
        self._ended = False
        self._counted: dict[int, tuple[ev.Route, int]] = {}
        """By attempt: its route, and how many sequences the router was told are using it."""
        self._search: _Search | None = None
        self._overrun = False
        """The outbox refused an event: nothing after it may be delivered either."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0

    def feed(self, event: ev.Event) -> None:
        """Hand ``event`` to the core and perform what follows. Never raises: a bug ends this
        request with ``Internal`` and touches no other."""
        self._queue.append(event)
        if self._feeding or self._ended:
            return
        self._feeding = True
        try:
            while self._queue and not self._ended:
                now_ms = self._around.clock.now_ms()
                for command in self.core.handle(self._queue.popleft(), now_ms):
                    self._perform(command)
            self._note_found()
        except Exception as error:
            _log.error("gateway.request_crashed", error=error)
            self._end(ev.Ended(ev.Failed(Internal("internal error in the gateway"))))
        finally:
            self._feeding = False
        self._arm()

    def _perform(self, command: ev.Command) -> None:
        match command:
            case ev.Deliver() | ev.ChoiceEnded() | ev.PromptScored():
                if isinstance(command, ev.ChoiceEnded):
                    self._recount()  # before the client knows
                if not self._overrun and not self._outbox.put(self._prompt_index, command):
                    _log.warning("gateway.slow_reader")
                    self._overrun = True
                    self._queue.appendleft(ev.ClientGone("slow"))
            case ev.ChooseRoute():
                self._choose(command)
            case ev.SendSubmit():
                self._submit(command)
                self._recount()
                measures.attempts.inc()
            case ev.SendAbort():
                self._around.spawn(self._abort(command), "abort")
            case ev.SendResend():
                self._around.spawn(self._resend(command), "resend")
            case ev.Ended(outcome):
                if isinstance(outcome, ev.Failed):
                    self._log_if_untold(outcome.fault)
                self._end(command)

    def _log_if_untold(self, fault: Fault) -> None:
        """Log what clients are not told, who learn only that there is an error in the mesh."""
        if from_fault(fault).status == 500:
            _log.error("gateway.request_failed", request=self.core.spec.request, error=fault)

    def _end(self, ended: ev.Ended) -> None:
        if self._ended:
            return
        self._ended = True
        self._queue.clear()
        self._recount()
        self._searched()
        if self._overrun:  # even when the core completed: the client does not have it all
            ended = ev.Ended(ev.Cancelled("slow"))
        self._outbox.put(self._prompt_index, ended)
        self._around.forget(self.core.spec.request)

    def _arm(self) -> None:
        """Schedule the next ``Tick`` for when it is due; one that comes early does no harm."""
        if self._ended:
            if self._timer is not None:
                self._timer.cancel()
            return
        due_ms = self.core.due_ms
        if self._timer is not None and self._timer_ms <= due_ms:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ms = due_ms
        wait_s = max(0, due_ms - self._around.clock.now_ms()) / 1_000
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.feed(ev.Tick())

    # Commands ---------------------------------------------------------------------------------

    def _choose(self, command: ev.ChooseRoute) -> None:
        self._note_found()
        search = self._search or _Search(self._around.clock.now_us(), _why_again(command))
        self._search = search
        search.tries += 1
        self._recount()
        found = self._route(command)
        if isinstance(found, Fault):
            search.error = found.code
            expected = self._around.expected()
            self._queue.append(ev.Unroutable(found, expected))
        else:
            search.error = ""
            self._around.given(found)
            self._queue.append(ev.Routed(found))
            search.end_us = self._around.clock.now_us()
            search.found = {
                semconv.PAGEMESH_WORKER: found.worker.name,
                "pagemesh.tokens.predicted": found.predicted_tokens,
                f"{semconv.PAGEMESH_TOKENS_LOST}.elsewhere": found.elsewhere_tokens,
                "pagemesh.decode": found.decode.name if found.decode else "",
            }

    def _note_found(self) -> None:
        if self._search is not None and self._search.found is not None:
            self._searched()

    def _searched(self) -> None:
        """Record the span of a search that has ended, if there was one."""
        search, self._search = self._search, None
        if search is None:
            return
        attributes = {
            semconv.PAGEMESH_REQUEST: self.core.spec.request,
            "pagemesh.route.tries": search.tries,
            **search.why,
            **(search.found or {}),
        }
        record_span(
            "route",
            self._context.child(),
            start_us=search.start_us,
            end_us=self._around.clock.now_us() if search.found is None else search.end_us,
            attributes=attributes,
            error=search.error,
        )

    def _route(self, command: ev.ChooseRoute) -> ev.Route | Fault:
        if self._around.bus.state is not BusState.CONNECTED:
            return Disconnected("the bus is away", retry_after_ms=1_000)
        read_cache = self.core.spec.read_cache
        return self._around.router.choose(self._model, self._salt, command, read_cache=read_cache)

    def _recount(self) -> None:
        """Tell the router which routes gained or lost sequences since the last count."""
        core, router = self.core, self._around.router
        now: dict[int, tuple[ev.Route, int]] = {}
        for choice in () if self._ended else core.choices:
            if choice.placed:
                route, count = now.get(choice.attempt, (core.routes[choice.attempt], 0))
                now[choice.attempt] = (route, count + core.spec.width)
        for attempt, (route, _) in (self._counted | now).items():
            _, before = self._counted.get(attempt, (route, 0))
            _, after = now.get(attempt, (route, 0))
            if after != before:
                router.count(route, after - before, answered=core.usage.completion_tokens > 0)
        self._counted = now

    def _submit(self, command: ev.SendSubmit) -> None:
        """Send the ``Submit`` first, and do the bookkeeping afterwards."""
        start_us, context = self._around.clock.now_us(), self._context.child()
        subject = subjects.worker(command.worker.name)
        sent: Asked | Fault
        try:
            with trace.use(context):
                sent = rpc.ask(
                    self._around.bus, subject, command.message, timeout_ms=command.timeout_ms,
                    then=_ask_pages(command),
                )  # fmt: skip
        except Fault as fault:
            sent = fault
        self._around.spawn(self._submitted(command, sent, context, start_us), "submit")

    async def _submitted(
        self, command: ev.SendSubmit, sent: Asked | Fault, context: TraceContext, start_us: int
    ) -> None:
        worker, message = command.worker, command.message
        answer: Accepted | Refused
        try:
            if isinstance(sent, Fault):
                raise sent
            answer = await rpc.answer_of(sent, Accepted)
            if answer.incarnation != worker.incarnation:
                answer = Refused.of(Stale("the worker has restarted: another incarnation answered"))
        except DeadlineExceeded:
            answer = Refused.of(Busy("the worker did not answer in time"))
        except Fault as fault:
            answer = Refused.of(fault)
            if isinstance(fault, Absent):
                self._around.absent(worker)
        self.feed(ev.SubmitAnswered(message.attempt, worker, answer))
        if not context.sampled:
            return
        subject = subjects.worker(worker.name)
        record_span(
            f"submit {subjects.template(subject)}",
            context,
            start_us=start_us,
            end_us=self._around.clock.now_us(),
            attributes={
                semconv.MESSAGING_SYSTEM: semconv.MESSAGING_SYSTEM_NATS,
                semconv.MESSAGING_OPERATION_NAME: "submit",
                semconv.MESSAGING_OPERATION_TYPE: "send",
                semconv.MESSAGING_DESTINATION_NAME: subject,
                semconv.MESSAGING_DESTINATION_TEMPLATE: subjects.template(subject),
                semconv.MESSAGING_CONVERSATION_ID: message.request,
                semconv.MESSAGING_BODY_SIZE: len(message.prompt),
                semconv.PAGEMESH_ATTEMPT: message.attempt,
                semconv.PAGEMESH_WORKER: worker.name,
            },
            kind="producer",
            error=answer.code if isinstance(answer, Refused) else "",
        )

    async def _resend(self, command: ev.SendResend) -> None:
        answer: Ok | Refused
        subject = subjects.worker(command.worker.name)
        try:
            with trace.use(self._context):
                answer = await rpc.call(
                    self._around.bus, subject, command.message, Ok, timeout_ms=command.timeout_ms
                )
        except Disconnected:
            return  # we are cut off, not the worker: silence makes the core ask again
        except Fault as fault:
            answer = Refused.of(fault)
            if isinstance(fault, Absent):
                self._around.absent(command.worker)
        self.feed(ev.ResendAnswered(command.message.key, command.worker, answer))

    async def _abort(self, command: ev.SendAbort) -> None:
        """Retry, so that it most likely arrives. If it is lost all the same, the worker's next
        frames reveal that (``Choice.overheard``, ``Orphans``)."""
        subject = subjects.worker(command.worker.name)
        for _ in range(_ABORT_TRIES_MAX):
            try:
                with trace.use(self._context):
                    await rpc.call(
                        self._around.bus,
                        subject,
                        command.message,
                        Ok,
                        timeout_ms=ABORT_TIMEOUT_MS,
                    )
                return
            except Gone:
                return
            except Fault:
                with contextlib.suppress(Disconnected):
                    await self._around.bus.wait_connected(timeout_ms=ABORT_TIMEOUT_MS)


def _why_again(command: ev.ChooseRoute) -> dict[str, str]:
    if not command.after:
        return {}
    avoided = sorted(worker.name for worker in command.avoid)
    return {"pagemesh.route.after": command.after, "pagemesh.route.avoided": ", ".join(avoided)}


def _ask_pages(command: ev.SendSubmit) -> Outgoing | None:
    """The question to the pager in the worker's name; the answer goes to the worker."""
    if command.pages is None:
        return None
    return Outgoing(
        subjects.pager(command.pages.host),
        codec.encode(command.pages.message),
        subjects.worker(command.worker.name),
    )
