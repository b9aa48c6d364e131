"""Which tokens may come next in an answer that follows a grammar.

    Grammars    the grammars compiled for one model's vocabulary   (any thread)
    Followers   where each running sequence is in its grammar      (the step thread, and its own)

A grammar is llguidance's own JSON (``Sampling.grammar``). How far a sequence is follows from its
tokens alone, so nothing of this is ever sent: whoever takes a sequence over reads its tokens again.

A grammar that can be read in very many ways may take minutes for a token, and llguidance cannot be
stopped meanwhile. So it works on a thread that is left behind when it takes too long.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from pagemesh.engine.worker.plan import Sample
from pagemesh.runtime.deep_stack import on_deep_stack
from pagemesh.runtime.lone_thread import LoneThread
from pagemesh.runtime.model_folder import tokenizer_file
from pagemesh.wire.errors import Busy, ConfigError, Fault, GrammarRefused, first_line

Bools = NDArray[np.bool_]
Found = Bools | Fault | None
_TOO_SLOW = "the grammar can be read in too many ways: it takes too long to follow"
_COMPILED_MAX = 64
_COMPILED_CHARACTERS_MAX = 1 << 20
"""Of all together, unless it is one: compiled, a character may take 200 bytes."""
_FOLLOWED_MAX = 1024
"""Sequences; one that was dropped reads its tokens again."""
_UNUSED_MAX = 16
"""Sequences that did not draw in the latest step, beyond as many as did."""
_SILENT = 0
_PATIENCE_S = 3.0
"""For all grammars of a step; most take some 50 us each. The whole worker waits meanwhile."""
_GRACE_S = 0.5
"""On top: the process may have been stopped in between."""
_SLOW_MAX = 1024
_STRAYS_MAX = 2
"""Threads left behind at once. Each takes a core for as long as it lasts."""


class Grammars:
    """Compiles grammars, and remembers the latest. The vocabulary is read at the first one, since
    most workers never get any."""

    def __init__(self, folder: Path, vocab_tokens: int) -> None:
        """``vocab_tokens``: how many logits the model has."""
        self._folder = folder
        self.vocab_tokens = vocab_tokens
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self._slow: OrderedDict[str, None] = OrderedDict()
        self._strays: list[Future[None]] = []

    def has(self, text: str) -> bool:
        """Whether ``begun`` would not have to compile ``text``."""
        return text in self._compiled

    def begun(self, text: str) -> Follower:
        """A follower of ``text`` at its beginning. May take a second the first time. Raises
        ``GrammarRefused``, and for a new one ``Busy`` while others hold up too much."""
        with self._lock:
            if text in self._slow:
                raise GrammarRefused(_TOO_SLOW)
            matcher = self._compiled.get(text)
            self._strays = [stray for stray in self._strays if not stray.done()]
            if matcher is None and len(self._strays) >= _STRAYS_MAX:
                raise Busy("grammars of others take all of the time", retry_after_ms=1_000)
        if matcher is None:  # steps that need no other grammar must not wait meanwhile
            with self._compiling:
                matcher = self._compiled.get(text) or self._compile(text)
        with self._lock:
            self._compiled[text] = matcher
            self._compiled.move_to_end(text)
            self._drop_oldest()
        return Follower(matcher.deep_copy(), self._vocabulary().eos_tokens, self.vocab_tokens)

    def was_slow(self, text: str, stray: Future[None]) -> None:
        """``text`` took too long, and ``stray`` still does: refuse it from now on."""
        with self._lock:
            self._compiled.pop(text, None)
            self._slow[text] = None
            if len(self._slow) > _SLOW_MAX:
                self._slow.popitem(last=False)
            self._strays.append(stray)

    def _drop_oldest(self) -> None:
        characters = sum(map(len, self._compiled))
        while len(self._compiled) > 1 and (
            len(self._compiled) > _COMPILED_MAX or characters > _COMPILED_CHARACTERS_MAX
        ):
            text, _ = self._compiled.popitem(last=False)
            characters -= len(text)

    def _compile(self, text: str) -> LLMatcher:
        vocabulary = self._vocabulary()
        try:
            matcher = on_deep_stack(lambda: LLMatcher(vocabulary, text, log_level=_SILENT))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust must not take the worker with it
            raise GrammarRefused(
                f"the grammar cannot be followed: {type(error).__name__}"
            ) from error
        if matcher.is_error():
            raise GrammarRefused(f"the grammar cannot be followed: {_said(matcher)}")
        return matcher

    def _vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            try:
                text = tokenizer_file(self._folder).read_text("utf-8")
                self._tokenizer = LLTokenizer(text)
            except (ConfigError, OSError, ValueError) as error:
                raise GrammarRefused(
                    f"this model's tokenizer cannot follow grammars: {first_line(error)}"
                ) from None
        return self._tokenizer


class Follower:
    """The place of one sequence in its grammar."""

    def __init__(self, matcher: LLMatcher, ends: Sequence[int], vocab_tokens: int) -> None:
        """``ends``: the tokens that ``matcher`` takes for the end of a text, whatever the model
        and the client call its end."""
        self._matcher = matcher
        self._ends = [token for token in ends if token < vocab_tokens]
        self._vocab_tokens = vocab_tokens
        self._taken_count = 0

    def allowed(self, sample: Sample) -> Bools:
        """bool [vocab_tokens]: what ``sample`` may draw. Each call is for more tokens of the same
        answer than the one before, or for fewer. Raises ``GrammarRefused`` when nothing may be
        drawn."""
        matcher = self._matcher
        if sample.generated_count < self._taken_count:  # what a run drew was revoked
            matcher.reset()
            self._taken_count = 0
        start = sample.prompt_count + self._taken_count
        fresh = sample.context[start:].tolist()
        fresh += sample.drawn[max(start - len(sample.context), 0) :]
        if fresh and not matcher.consume_tokens(fresh):
            raise GrammarRefused(f"the answer so far does not follow the grammar: {_said(matcher)}")
        self._taken_count = sample.generated_count
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise GrammarRefused(f"the grammar cannot be followed: {_said(matcher)}")
        known = np.unpackbits(bits, count=min(8 * len(bits), self._vocab_tokens), bitorder="little")
        mask = np.zeros(self._vocab_tokens, np.bool_)
        mask[: len(known)] = known
        mask[self._ends] = False
        stops = [token for token in sample.sampling.stop_tokens if token < self._vocab_tokens]
        mask[stops] = matcher.is_accepting()  # one that is text as well would end it anywhere
        if not mask.any():
            raise GrammarRefused("no token of this model's vocabulary can continue the answer")
        return mask


@dataclass(slots=True)
class _Job:
    """The grammars of a step's samples."""

    samples: Sequence[Sample]
    found: list[Found]
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_left: bool = False
    """Nobody waits for it any more: what it still finds does not count."""


class Followers:
    """The followers of the sequences that draw."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._kept: OrderedDict[tuple[str, int, int], Follower] = OrderedDict()
        self._thread = LoneThread("pagemesh-grammar")

    def allowed(self, samples: Sequence[Sample]) -> list[Found]:
        """What each of a step's ``samples`` may draw: anything where it has no grammar, nothing
        where there is an error."""
        found: list[Found] = [None] * len(samples)
        places = [index for index, sample in enumerate(samples) if sample.sampling.grammar]
        while left := [index for index in places if found[index] is None]:
            self._fill(samples, found, left)
        self._drop_unused(len(places))
        return found

    def _fill(self, samples: Sequence[Sample], found: list[Found], places: list[int]) -> None:
        """Fill those ``places`` of ``found``, or some, and one with an error."""
        job = _Job([samples[place] for place in places], [None] * len(places))
        work = self._thread.submit(self._work, job)
        for seconds in (_PATIENCE_S, _GRACE_S):
            with suppress(TimeoutError):
                work.result(seconds)
                break
        with job.lock:
            job.is_left = True
            stuck = next((at for at, one in enumerate(job.found) if one is None), None)
        if stuck is not None:
            self._grammars.was_slow(job.samples[stuck].sampling.grammar, work)
            self._thread.shutdown(wait=False)
            self._thread = LoneThread("pagemesh-grammar")
            job.found[stuck] = GrammarRefused(_TOO_SLOW)
        for place, one in zip(places, job.found, strict=True):
            found[place] = one

    def _work(self, job: _Job) -> None:
        for at, sample in enumerate(job.samples):
            key = (sample.key.request, sample.key.attempt, sample.key.choice)
            with job.lock:
                if job.is_left:
                    return
                follower = self._kept.pop(key, None)
            made: Bools | Fault
            try:
                follower = follower or self._grammars.begun(sample.sampling.grammar)
                made = follower.allowed(sample)
            except Fault as error:
                made = error
            except Exception:
                raise
            except BaseException as error:  # a panic in Rust must not take the worker with it
                made = GrammarRefused(f"the grammar cannot be followed: {type(error).__name__}")
            with job.lock:
                if job.is_left:
                    return
                job.found[at] = made
                if follower is not None and not isinstance(made, Fault):
                    self._kept[key] = follower

    def _drop_unused(self, used_count: int) -> None:
        """Drop the followers of sequences that seem to have ended: each holds its grammar,
        compiled."""
        if used_count:
            most = min(2 * used_count + _UNUSED_MAX, _FOLLOWED_MAX)
            while len(self._kept) > most:
                self._kept.popitem(last=False)


def _said(matcher: LLMatcher) -> str:
    return first_line(ValueError(matcher.get_error()))
