"""Requests of gateways and other workers: submit, attach, abort, resend."""

from __future__ import annotations

import numpy as np

from pagemesh.engine.worker import ending, frames
from pagemesh.engine.worker.beam_group import BeamGroup
from pagemesh.engine.worker.desk import Desk
from pagemesh.engine.worker.lease import TokenBuffer
from pagemesh.engine.worker.sequence import Owner, Phase, Sequence, Ticket
from pagemesh.wire.errors import Busy, DeadlineExceeded, Gone, Malformed, NoCapacity, Stale
from pagemesh.wire.messages import Message, Ok, Order, SequenceKey
from pagemesh.wire.tokens import U32, unpack
from pagemesh.wire.work_messages import Abort, Accepted, Attach, Resend, Sampling, Submit

_CAPACITY_AHEAD_MAX = 4_096


class Intake:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._aborted: dict[tuple[str, int | None], tuple[int, float]] = {}
        """By (request, choice; None: all choices), the highest aborted attempt and until when
        it is remembered."""
        self._lost: dict[Owner, float] = {}
        """Gateway incarnations that are gone, and until when each is remembered."""
        self.draining = False

    # Questions ------------------------------------------------------------------------------

    def submit(self, message: Submit) -> tuple[Message, list[Sequence]]:
        """The answer, and the sequences that are new. Raises ``Fault`` to refuse."""
        self._require_same_weights(message)
        prompt = unpack(message.prompt)
        choices = {start.choice: unpack(start.generated) for start in message.choices}
        keys = {
            choice: SequenceKey(request=message.request, attempt=message.attempt, choice=choice)
            for choice in choices
        }
        new = [choice for choice in sorted(choices) if keys[choice] not in self._desk.sequences]
        if new:
            if len(choices) != len(message.choices):
                raise Malformed("choices: two have the same index")
            new = [choice for choice in new if not self._over(keys[choice])]
            if not new:
                raise Gone("the request was aborted, or a newer attempt has replaced it")
            self._admissible(prompt, message.sampling, message.deadline_ms, len(new))
        if message.decode is not None:
            self._desk.lost_workers.pop(message.decode, None)
        self._lost.pop(Owner(message.gateway, message.gateway_incarnation), None)
        made = [self._submitted(message, prompt, keys[choice], choices[choice]) for choice in new]
        _group([one for one in made if not one.has_first_token and not one.ended])
        return self._accepted(), made

    def attach(self, message: Attach) -> tuple[Message, list[Sequence]]:
        """Like ``submit``, for a sequence that prefill hands over."""
        self._require_same_weights(message)
        if message.key in self._desk.sequences:
            return self._accepted(), []
        if self._over(message.key):
            raise Gone("the sequence was aborted, or a newer attempt has replaced it")
        owner = Owner(message.gateway, message.gateway_incarnation)
        if owner in self._lost:
            raise Gone("the gateway of the sequence is gone")
        prompt, generated = unpack(message.prompt), unpack(message.generated)
        if message.handle.token_count > len(prompt) + len(generated):
            raise Malformed("handle: token_count exceeds the tokens of prompt and answer")
        scores = frames.unpacked_scores(message.logprobs, len(generated))
        self._admissible(prompt, message.sampling, message.deadline_ms, 1)
        sequence = self._make(
            message.key,
            owner,
            message.order,
            message.root,
            message.sampling,
            prompt,
            generated,
            message.deadline_ms,
        )
        sequence.read_cache, sequence.terms = message.read_cache, message.terms
        sequence.scores, sequence.waterfall = scores, message.waterfall
        sequence.waterfall_told = message.waterfall is not None
        sequence.ticket = Ticket(
            message.ticket, self._desk.now + message.handle.ttl_ms, handle=message.handle
        )
        sequence.phase = Phase.REDEEMING
        self._start(sequence)
        return self._accepted(), [sequence]

    def abort(self, message: Abort) -> Message:
        """Abort the sequences that are here, and refuse those that come late."""
        limits, place = self._desk.limits, (message.request, message.choice)
        known = self._aborted.pop(place, (0, 0.0))[0]
        if len(self._aborted) >= limits.aborts_max:
            del self._aborted[next(iter(self._aborted))]
        self._aborted[place] = (max(known, message.attempt), self._desk.now + limits.abort_ms)
        for sequence in self._of_request(message.request):
            wanted = message.choice is None or message.choice == sequence.key.choice
            if wanted and sequence.key.attempt <= message.attempt and not sequence.ended:
                ending.abort(self._desk, sequence)
        return Ok()

    def resend(self, message: Resend) -> Message:
        sequence = self._desk.sequences.get(message.key)
        if sequence is None or (sequence.phase is Phase.DONE and sequence.finish == "abort"):
            raise Gone("the sequence is not on this worker (any more)")
        frames.tell_again(self._desk, sequence, message.position)
        if sequence.phase is Phase.HANDED:
            # Tokens drawn here are sent again, but only decode knows what comes after them.
            raise Gone("the sequence moved to another worker")
        return Ok()

    def lose(self, owner: Owner) -> None:
        """That gateway is gone. Other workers may still hand over its sequences, which would be
        computed for nobody: refuse them. A ``Submit`` shows that the gateway is back."""
        self._lost.pop(owner, None)
        if len(self._lost) >= self._desk.limits.gateways_max:
            del self._lost[next(iter(self._lost))]
        self._lost[owner] = self._desk.now + self._desk.limits.retain_ms

    def forget(self) -> None:
        """Drop what was kept long enough."""
        desk = self._desk
        for owner, until_ms in list(self._lost.items()):
            if until_ms > desk.now:
                break
            del self._lost[owner]
        for place, (_, until_ms) in list(self._aborted.items()):
            if until_ms > desk.now:
                break
            del self._aborted[place]
        while desk.ended:
            sequence = desk.ended[0]
            fits = len(desk.ended) <= desk.limits.retained_max
            if fits and sequence.ended_ms + desk.limits.retain_ms > desk.now:
                break
            desk.ended.popleft()
            key = sequence.key
            if desk.sequences.get(key) is sequence:
                del desk.sequences[key]
            if desk.latest.get((key.request, key.choice)) is sequence:
                del desk.latest[(key.request, key.choice)]

    # Parts ----------------------------------------------------------------------------------

    def _accepted(self) -> Accepted:
        identity = self._desk.identity
        return Accepted(worker=identity.name, incarnation=identity.incarnation)

    def _require_same_weights(self, message: Submit | Attach) -> None:
        """Raises ``Stale`` for a message that is meant for other weights. Workers are addressed by
        name, and this one may have just replaced another of its name. It must not read pages of
        the sequence's tree, nor write any: workers with the right weights would serve them."""
        if message.model_root != self._desk.identity.model_root:
            raise Stale("this worker now serves another model: route the request again")

    def _over(self, key: SequenceKey) -> bool:
        """Whether this attempt was aborted, or a newer one arrived before it."""
        for place in ((key.request, None), (key.request, key.choice)):
            if place in self._aborted and self._aborted[place][0] >= key.attempt:
                return True
        latest = self._desk.latest.get((key.request, key.choice))
        return latest is not None and latest.key.attempt > key.attempt

    def _admissible(
        self, prompt: U32, sampling: Sampling, deadline_ms: int, choice_count: int
    ) -> None:
        """Raises the ``Fault`` that says why these choices cannot be taken."""
        desk, limits = self._desk, self._desk.limits
        if self.draining:
            raise Busy("the worker is draining", retry_after_ms=limits.retry_ms_max)
        if not len(prompt):
            raise Malformed("prompt: it is empty")
        if deadline_ms < limits.deadline_ms_min:
            raise DeadlineExceeded("too little time is left before the deadline")
        slots = len(prompt) + max(sampling.max_tokens - 1, 0)
        if slots > limits.context_tokens_max:
            raise NoCapacity(
                f"{slots} tokens exceed the model's context of {limits.context_tokens_max}"
            )
        if sampling.beams is not None:
            size = desk.page_size
            slots = size * sampling.beams.pages_max(len(prompt), sampling.max_tokens, size)
        if desk.pool_pages and slots > desk.pool_pages * desk.page_size:
            raise NoCapacity(
                f"{slots} token slots exceed the pool of {desk.pool_pages * desk.page_size}"
            )
        if len(desk.live) + choice_count > limits.sequences_max:
            raise Busy(
                f"the worker has {len(desk.live)} sequences, at most {limits.sequences_max}",
                retry_after_ms=limits.retry_ms_max,
            )
        if waiting_tokens(desk) + len(prompt) > limits.waiting_tokens_max:
            raise Busy("too many tokens are waiting already", retry_after_ms=limits.retry_ms_max)

    def _submitted(
        self, message: Submit, prompt: U32, key: SequenceKey, generated: U32
    ) -> Sequence:
        sequence = self._make(
            key,
            Owner(message.gateway, message.gateway_incarnation),
            Order(
                priority=message.priority,
                arrival_us=message.arrival_us,
                request=key.request,
                choice=key.choice,
            ),
            message.root,
            message.sampling,
            prompt,
            generated,
            message.deadline_ms,
        )
        sequence.prompt_logprobs = message.prompt_logprobs
        sequence.read_cache, sequence.terms = message.read_cache, message.terms
        sequence.decode = message.decode
        self._start(sequence)
        _finished_before(self._desk, sequence)
        return sequence

    def _make(
        self,
        key: SequenceKey,
        owner: Owner,
        order: Order,
        root: bytes,
        sampling: Sampling,
        prompt: U32,
        generated: U32,
        deadline_ms: int,
    ) -> Sequence:
        tokens = np.concatenate([prompt, generated])
        ahead = min(max(sampling.max_tokens - len(generated), 0), _CAPACITY_AHEAD_MAX)
        beams = None
        if sampling.beams is not None:
            beams = BeamGroup(sampling, prompt, self._desk.page_size)
        return Sequence(
            key=key,
            order=order,
            owner=owner,
            root=root,
            sampling=sampling,
            tokens=TokenBuffer(tokens, len(tokens) + ahead),
            prompt_count=len(prompt),
            start_count=len(generated),
            deadline_ms=self._desk.now + deadline_ms,
            decode=None,
            read_cache=True,
            submitted_ms=self._desk.now,
            stops=frozenset(sampling.stop_tokens),
            beams=beams,
        )

    def _start(self, sequence: Sequence) -> None:
        """Register the sequence, and abort an older attempt at the same choice."""
        desk = self._desk
        older = desk.latest.get((sequence.key.request, sequence.key.choice))
        if older is not None and not older.ended:
            ending.abort(desk, older)
        desk.add(sequence)

    def _of_request(self, request: str) -> list[Sequence]:
        return [one for one in self._desk.live.values() if one.key.request == request]


def waiting_tokens(desk: Desk) -> int:
    """Context tokens accepted and not computed yet."""
    total = 0
    for sequence in desk.live.values():
        if sequence.phase in (Phase.WAITING, Phase.ADMITTING):
            total += sequence.tokens.length
        elif sequence.phase is Phase.PREFILL and sequence.lease is not None:
            total += sequence.tokens.length - sequence.lease.filled
    return total


def _group(fresh: list[Sequence]) -> None:
    """Choices without tokens of their own share one computation of the prompt."""
    if len(fresh) > 1:
        leader, *rest = fresh
        leader.followers = rest
        for follower in rest:
            follower.leader = leader
            follower.phase = Phase.FOLLOWING


def _finished_before(desk: Desk, sequence: Sequence) -> None:
    """End a choice that was already complete when it arrived."""
    count = sequence.generated_count
    if not count:
        return
    last = int(sequence.tokens.view(sequence.tokens.length - 1, sequence.tokens.length)[0])
    if last in sequence.stops and count > sequence.sampling.min_tokens:
        sequence.stop_token = last
        ending.finish(desk, sequence, "stop", first_position=count)
    elif count >= sequence.sampling.max_tokens:
        ending.finish(desk, sequence, "length", first_position=count)
