"""What both doors share: from the body of a call to its answer, whole or in chunks.

parse, tokenise (each on a thread when large) -> fit to the model -> one life per prompt
  -> events, rendered as they come -> spans and metrics at the end
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pagemesh.gateway.actor import GatewayActor
from pagemesh.gateway.api.api_errors import ApiError, bad, cancelled, from_fault
from pagemesh.gateway.api.openai_api import Ask, parse_chat, parse_completion
from pagemesh.gateway.api.render import ANSWER_BYTES_MAX, SCORE_BYTES, TOKEN_BYTES, Renderer
from pagemesh.gateway.api.response_render import renderer_of
from pagemesh.gateway.api.sampling_defaults import OPENAI, SamplingDefaults
from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.call_facts import CallFacts, ends_counted
from pagemesh.gateway.calls.prepare import Work, carried_tokens, fit, understood
from pagemesh.gateway.calls.request import RequestCore
from pagemesh.gateway.calls.spec import RequestLimits, RequestSpec, Usage
from pagemesh.gateway.doors.next_turn import NextTurn, NextTurns
from pagemesh.gateway.doors.off_loop import THREAD_BYTES_MIN, off_loop
from pagemesh.gateway.doors.tenant_limits import TenantLimits
from pagemesh.gateway.doors.tenants import Tenants
from pagemesh.gateway.life import Life
from pagemesh.gateway.outbox import Outbox
from pagemesh.gateway.words.tokens import Tokens
from pagemesh.runtime import trace
from pagemesh.runtime.clock import came_us
from pagemesh.runtime.ids import new_request_id
from pagemesh.wire.errors import Busy, Fault
from pagemesh.wire.identity import tenant_root
from pagemesh.wire.tokens import U32

PARSE_BYTES_MIN = 64 << 10
"""Longer bodies are parsed on a thread."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls and how. ``headers`` have lower-case keys."""

    door: str
    tenant: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed body, whatever model it names."""

    ask: Ask
    arrival_us: int
    body_bytes: int


@dataclass(frozen=True, slots=True)
class Understood(Parsed):
    """A parsed body for the model that is served, with its prompts tokenised."""

    prompts: list[U32]
    salt: bytes


class Front:
    """Answers calls. ``model`` is the name by which clients ask for the one model that is served;
    ``defaults`` are the sampling parameters of requests that give none."""

    def __init__(
        self,
        gateway: GatewayActor,
        tokens: Tokens,
        tenants: Tenants,
        *,
        model: str,
        request_timeout_ms: int,
        defaults: SamplingDefaults = OPENAI,
        trace_ratio: float = 1.0,
        limits: RequestLimits | None = None,
    ) -> None:
        self.gateway = gateway
        self.tokens = tokens
        self.tenants = tenants
        self.model = model
        self.defaults = defaults
        self.created = int(time.time())
        self._request_timeout_ms = request_timeout_ms
        self._trace_ratio = trace_ratio
        self._limits = limits or RequestLimits()
        self.next_turns = NextTurns(tokens)
        self._call_count = 0
        self._calls_of: Counter[str] = Counter()
        """By tenant."""

    @contextlib.contextmanager
    def entered(self, tenant: str) -> Iterator[None]:
        """Count a call of ``tenant``: from before its body is read, since bodies take memory long
        before they are requests, until it was answered. Raises ``ApiError`` when there are too many
        calls, in total or of the tenant."""
        requests_max = self.tenants.limits_of(tenant).requests_max
        if requests_max and self._calls_of[tenant] >= requests_max:
            text = f"your limit of {requests_max} open requests is reached: wait for one to end"
            raise ApiError(429, text, code="quota_exceeded", retry_after_ms=1_000)
        if self._call_count >= self.gateway.request_count_max:
            raise ApiError(429, "too many requests at once", retry_after_ms=1_000)
        self._call_count += 1
        self._calls_of[tenant] += 1
        try:
            yield
        finally:
            self._call_count -= 1
            self._calls_of[tenant] -= 1
            if not self._calls_of[tenant]:
                del self._calls_of[tenant]

    @contextlib.contextmanager
    def asked(self, tenant: str, door: str, *, chat: bool) -> Iterator[None]:
        """``entered`` for a completion, which is counted as a request even if it is refused."""
        with contextlib.ExitStack() as stack:
            with ends_counted(door, chat=chat):
                stack.enter_context(self.entered(tenant))
            yield

    async def parse(
        self, body: bytes, caller: Caller, *, chat: bool, parser: Callable[..., Ask] | None = None
    ) -> Parsed:
        """Raises ``ApiError``. ``parser``: of a body that is in another form."""
        arrival_us = self.gateway.clock.now_us()
        parser = parser or (parse_chat if chat else parse_completion)
        with ends_counted(caller.door, chat=chat):
            work = partial(self._parsed, body, parser)
            ask = await off_loop(len(body), work, owner=caller.tenant, bytes_min=PARSE_BYTES_MIN)
        return Parsed(ask, arrival_us, len(body))

    def _parsed(self, body: bytes, parser: Callable[..., Ask]) -> Ask:
        return parser(body, served=self.model, defaults=self.defaults)

    async def understand(self, parsed: Parsed, caller: Caller) -> Understood:
        """Tokenise it, if it is for the model that is served. Raises ``ApiError``."""
        ask, facts = parsed.ask, self.gateway.known_facts
        with ends_counted(caller.door, chat=ask.chat):
            self.check_model(ask.model)
            size = 0 if ask.is_packed else parsed.body_bytes
            # Whoever shares cached pages also shares remembered token ids.
            salt = self.tenants.salt(caller.tenant, ask.cache_salt)
            work = partial(understood, ask, self.tokens, facts, salt)
            # Grammars take time to check, however short they are.
            least = 0 if ask.grammar or ask.tools else THREAD_BYTES_MIN
            ask, prompts = await off_loop(size, work, owner=caller.tenant, bytes_min=least)
        return Understood(ask, parsed.arrival_us, parsed.body_bytes, prompts, salt)

    def check_model(self, model: str) -> None:
        """Raises ``ApiError`` for a model that is not served here."""
        if model != self.model:
            message = f"the model {model[:100]!r} does not exist; available: {self.model}"
            raise ApiError(404, message, "model", "model_not_found")

    @contextlib.asynccontextmanager
    async def call(self, understood: Understood, caller: Caller) -> AsyncIterator[Call]:
        """A call in progress; what is unfinished at the end of the context is cancelled. Raises
        ``ApiError``."""
        ask = understood.ask
        context = trace.accept(caller.headers, ratio=self._trace_ratio)
        facts = CallFacts(ask, caller.door, context, understood.arrival_us)
        turn = NextTurn(ask, understood.body_bytes)
        lives: list[Life] = []
        limits = self.tenants.limits_of(caller.tenant)
        try:
            with trace.use(context):
                works = await self._works(understood, limits)
                outbox = Outbox()
                lives += self._lives(understood, works, caller, outbox, context)
                self._begin(lives)  # submitted before we make what only the answer needs
                renderer = renderer_of(ask, self.tokens, facts.response_id, time.time)
                yield Call(self, ask, understood.prompts, lives, outbox, renderer, facts, turn)
        except Exception as error:
            facts.failed(error)
            raise
        finally:
            for life in lives:
                life.feed(ev.ClientGone())
            facts.close([life.core for life in lives], self.gateway.clock.now_us())
        self.next_turns.expect(turn, understood.salt)

    async def _works(self, understood: Understood, limits: TenantLimits) -> list[Work]:
        ask = understood.ask
        count, count_max = len(ask.prompts), self.gateway.request_count_max
        if count > count_max:
            raise bad("prompt", f"{count} prompts exceed the limit of {count_max} requests at once")
        if not self.gateway.room(count):
            raise ApiError(429, "too many requests at once", retry_after_ms=1_000)
        try:
            facts = await self.gateway.facts(self._limits)
            bytes_max = self.gateway.bus.message_bytes_max
        except Fault as fault:
            raise from_fault(fault) from None
        seed = secrets.randbits(63)
        quota_tokens = limits.quota_tokens(facts.pool_pages, facts.page_size)
        return fit(
            ask, understood.prompts, facts, self.tokens.end_tokens, seed,
            quota_tokens=quota_tokens, message_bytes_max=bytes_max,
        )  # fmt: skip

    def cache_roots(self, tenant: str, cache_salt: str) -> list[str]:
        """The roots, in hexadecimal, under which the mesh caches what ``tenant`` sends: one for
        each model that workers serve now."""
        there = self.gateway.presence.directory
        workers = (*there.of_role("prefill"), *there.of_role("decode"))
        salt = self.tenants.salt(tenant, cache_salt)
        models = {worker.model.model_root for worker in workers if worker.model is not None}
        return sorted(tenant_root(model, salt).hex() for model in models)

    def _lives(
        self,
        understood: Understood,
        works: Sequence[Work],
        caller: Caller,
        outbox: Outbox,
        context: trace.TraceContext,
    ) -> list[Life]:
        ask = understood.ask
        terms = self.tenants.limits_of(caller.tenant).terms(caller.tenant, ask.cache_ttl_s)
        bytes_max = self.gateway.bus.message_bytes_max - ask.grammar_bytes
        scored = ask.echo and ask.logprobs is not None
        clock = self.gateway.clock
        now_ms, arrival_us = clock.now_ms(), came_us(clock, understood.arrival_us)
        made: list[Life] = []
        for index, work in enumerate(works):
            spec = RequestSpec(
                request=new_request_id(),
                gateway=self.gateway.name,
                gateway_incarnation=self.gateway.incarnation,
                priority=ask.priority,
                arrival_us=arrival_us,
                prompt=work.prompt,
                choice_count=ask.best_of,
                sampling=work.sampling,
                deadline_ms=now_ms + self._request_timeout_ms,
                prompt_logprobs=scored,
                read_cache=not scored,
                terms=terms,
                submit_tokens_max=carried_tokens(bytes_max),
                own_stops=frozenset(ask.stop_tokens),
                show_stop=ask.show_stop,
            )
            texts = [
                self.tokens.stream(
                    stops=list(ask.stops),
                    show_stop=ask.show_stop,
                    skip_special_tokens=ask.skip_special_tokens,
                    min_tokens=ask.min_tokens,
                    after=work.prompt if work.goes_on else None,
                    shown=ask.shown_tokens,
                )
                for _ in range(ask.best_of)
            ]
            core = RequestCore(spec, self._limits, texts, now_ms)
            life = Life(
                self.gateway.surroundings, core, outbox, prompt_index=index, model=self.model,
                salt=understood.salt, context=context,
            )  # fmt: skip
            made.append(life)
        return made

    def _begin(self, lives: Sequence[Life]) -> None:
        try:
            for life in lives:
                self.gateway.begin(life)
        except Busy as fault:
            raise ApiError(429, fault.message, retry_after_ms=fault.retry_after_ms) from None


class Call:
    """One call in progress; read it once, by ``whole`` or by ``chunks``."""

    def __init__(
        self,
        front: Front,
        ask: Ask,
        prompts: list[U32],
        lives: Sequence[Life],
        outbox: Outbox,
        renderer: Renderer,
        facts: CallFacts,
        turn: NextTurn,
    ) -> None:
        self.ask = ask
        self._clock = front.gateway.clock
        self._prompts = prompts
        self._lives = lives
        self._outbox = outbox
        self._renderer = renderer
        self.failed = renderer.failed  # makes the chunks that end a stream after an error
        self._facts = facts
        self._turn = turn
        self._open_count = len(lives)
        self._echoed: set[int] = set()

    @property
    def usage(self) -> Usage:
        parts = [life.core.usage for life in self._lives]
        return Usage(
            sum(part.prompt_tokens for part in parts),
            sum(part.completion_tokens for part in parts),
            sum(part.cached_tokens for part in parts),
        )

    async def whole(self, bytes_max: int = ANSWER_BYTES_MAX) -> bytes:
        """The answer in one piece of about ``bytes_max`` at most. Raises ``ApiError``."""
        collected = self._renderer.collect(self._prompts, bytes_max)
        while self._open_count:
            for prompt_index, event in await self._outbox.take():
                match event:
                    case ev.Deliver():
                        self._delivered(event)
                        collected.delivered(prompt_index, event)
                    case ev.ChoiceEnded():
                        self._choice_ended(event)
                        collected.ended(prompt_index, event)
                    case ev.PromptScored(logprobs):
                        collected.scored(prompt_index, logprobs)
                    case ev.Ended():
                        self._ended(event)
        usage = self.usage
        return await off_loop(
            collected.size_bytes, lambda: self._renderer.response(collected, self._prompts, usage)
        )

    async def chunks(self) -> AsyncIterator[list[bytes]]:
        """The answer as JSON chunks, those available together in one list. Raises ``ApiError`` in
        place of the rest; if nothing was delivered by then, nothing was yielded."""
        opening = self._renderer.opening(self._prompts)
        while self._open_count:
            out: list[bytes] = []
            failed: ApiError | None = None
            for prompt_index, event in await self._outbox.take():
                try:
                    if self.ask.echo:
                        out += await self._echo(prompt_index, event)
                    out += self._render(prompt_index, event)
                except ApiError as error:
                    failed = error
                    break
            if out:
                yield opening + out
                opening = []
            if failed is not None:
                raise failed
        work = partial(self._renderer.last, self.usage)
        if last := opening + await off_loop(self._renderer.kept_bytes, work):
            yield last

    async def _echo(self, prompt_index: int, event: object) -> list[bytes]:
        """The chunks that echo a prompt, at the first event of its answer."""
        if prompt_index in self._echoed or isinstance(event, ev.Ended):
            return []
        self._echoed.add(prompt_index)
        scores = event.logprobs if isinstance(event, ev.PromptScored) else None
        prompt = self._prompts[prompt_index]
        value_bytes = 0 if scores is None else len(scores.chosen + scores.top_values)
        return await off_loop(
            (SCORE_BYTES // 4 * value_bytes + TOKEN_BYTES * len(prompt)) * self.ask.n,
            lambda: self._renderer.echoed(prompt_index, prompt, scores),
        )

    def _render(self, prompt_index: int, event: object) -> list[bytes]:
        """The chunks of ``event``, if there is something to show."""
        match event:
            case ev.Deliver():
                self._delivered(event)
                return self._renderer.chunks_of(prompt_index, event)
            case ev.ChoiceEnded():
                self._choice_ended(event)
                return self._renderer.chunks_of(prompt_index, event)
            case ev.Ended():
                self._ended(event)
        return []

    def _delivered(self, event: ev.Deliver) -> None:
        self._facts.delivered(event, self._clock.now_us())
        self._turn.said(event.text)

    def _choice_ended(self, event: ev.ChoiceEnded) -> None:
        self._facts.finish_reasons.append(event.finish)
        self._turn.said(event.text)

    def _ended(self, event: ev.Ended) -> None:
        self._open_count -= 1
        match event.outcome:
            case ev.Failed(fault):
                raise from_fault(fault)
            case ev.Cancelled(why):
                raise cancelled(why)
