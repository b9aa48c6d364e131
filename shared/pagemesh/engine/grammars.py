"""Which tokens may come next in an answer that follows a grammar.

    Grammars    the grammars compiled for one model's vocabulary   (any thread)
    Followers   where each running sequence is in its grammar      (the step thread)

A grammar is llguidance's own JSON (``Sampling.grammar``). How far a sequence is follows from its
tokens alone, so nothing of this is ever sent: whoever takes a sequence over reads its tokens again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from pagemesh.engine.worker.plan import Sample
from pagemesh.runtime.deep_stack import on_deep_stack
from pagemesh.runtime.model_folder import tokenizer_file
from pagemesh.wire.errors import ConfigError, GrammarRefused, first_line

Bools = NDArray[np.bool_]
_COMPILED_MAX = 64
_COMPILED_CHARACTERS_MAX = 1 << 20
"""Of all together, unless it is one: compiled, a character may take 200 bytes."""
_FOLLOWED_MAX = 1024
"""Sequences; one that was dropped reads its tokens again."""
_UNUSED_MAX = 16
"""Sequences that did not draw in the latest step, beyond as many as did."""
_SILENT = 0


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

    def has(self, text: str) -> bool:
        """Whether ``begun`` would not have to compile ``text``."""
        return text in self._compiled

    def begun(self, text: str) -> Follower:
        """A follower of ``text`` at its beginning. May take a second the first time. Raises
        ``GrammarRefused``."""
        with self._lock:
            matcher = self._compiled.pop(text, None)
        if matcher is None:  # steps that need no other grammar must not wait meanwhile
            with self._compiling:
                matcher = self._compiled.get(text) or self._compile(text)
        with self._lock:
            self._compiled[text] = matcher
            self._drop_oldest()
        return Follower(matcher.deep_copy(), self._vocabulary().eos_tokens, self.vocab_tokens)

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


class Followers:
    """The followers of the sequences that draw."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._kept: OrderedDict[tuple[str, int, int], Follower] = OrderedDict()
        self._used_count = 0
        """Since the step began."""

    def allowed(self, sample: Sample) -> Bools:
        """What ``sample``, which has a grammar, may draw. Raises ``GrammarRefused``."""
        key = (sample.key.request, sample.key.attempt, sample.key.choice)
        follower = self._kept.pop(key, None) or self._grammars.begun(sample.sampling.grammar)
        allowed = follower.allowed(sample)
        self._kept[key] = follower
        self._used_count += 1
        if len(self._kept) > _FOLLOWED_MAX:
            self._kept.popitem(last=False)
        return allowed

    def step_ended(self) -> None:
        """Drop those of sequences that seem to have ended: each holds its grammar, compiled."""
        if self._used_count:
            most, self._used_count = 2 * self._used_count + _UNUSED_MAX, 0
            while len(self._kept) > most:
                self._kept.popitem(last=False)


def _said(matcher: LLMatcher) -> str:
    return first_line(ValueError(matcher.get_error()))
