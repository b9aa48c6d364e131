"""Beam search: which continuations to extend, and which are the answer.

    beams, likeliest first --the likeliest tokens after each--> candidates, all together
        candidates that end --the best ``width`` of the first ``width``--> finished
        others              --the likeliest ``width``--------------------> beams

The answer is the one that ``transformers`` gives for the same log-probabilities: candidates
are ranked by the sum of their tokens' log-probabilities, finished ones by that sum divided by
``length ** length_penalty``. Among equals the earlier beam comes first, then the lower id.

Pure: it knows nothing of pages (``beam_pages``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagemesh.engine.worker.plan import Drawn, TokenScores
from pagemesh.wire.tokens import pack
from pagemesh.wire.work_messages import Beams, Finish, Hypothesis, Sampling, TopLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A continuation, stored as its last token and the beam before that. ``logprob`` is the sum
    over its tokens, as float32. Beams share their common prefix, so that a step costs the same
    however long they are."""

    logprob: np.float32
    last: Candidate | None = None
    """None: the empty continuation of the prompt."""
    before: Beam | None = None

    def after(self, one: Candidate) -> Beam:
        """This beam with one more token."""
        return Beam(one.whole, one, self)

    @property
    def path(self) -> list[Candidate]:
        """Its tokens in order."""
        found: list[Candidate] = []
        beam: Beam | None = self
        while beam is not None and beam.last is not None:
            found.append(beam.last)
            beam = beam.before
        return found[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    parent: int
    """Index of the beam that it continues."""
    token: int
    logprob: float
    """That of the token."""
    whole: np.float32
    """Log-probability of the whole continuation."""
    reported: TokenScores | None
    """Alternatives to the token, if they are wanted."""


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    score: float
    beam: Beam


class BeamSearch:
    """Call ``advance`` with what may follow each of ``beams``, until ``ended``."""

    def __init__(self, sampling: Sampling) -> None:
        assert sampling.beams is not None
        self._want: Beams = sampling.beams
        self._stops = frozenset(sampling.stop_tokens)
        self._tokens_max = sampling.max_tokens
        self.beams: list[Beam] = [Beam(np.float32(0.0))]
        """Most likely first. At the start only the empty continuation."""
        self.length = 0
        """Tokens of each beam."""
        self.ended = False
        self._finished: list[Finished] = []
        """Best first."""

    @property
    def candidate_count(self) -> int:
        """Tokens to consider after each beam: enough to have ``width`` to continue with even if
        every stop token is among the most likely."""
        return (1 + max(len(self._stops), 1)) * self._want.width

    def advance(self, drawn: Sequence[Drawn]) -> list[int]:
        """Advance by one token. ``drawn``: what was reported for each beam. Returns, for each new
        beam, the index of the earlier beam that it continues."""
        assert len(drawn) == len(self.beams) and not self.ended
        self.length += 1
        found, width = self._candidates(drawn), self._want.width
        self._finish([one for one in found[:width] if self._ends(one)])
        going = [one for one in found if not self._ends(one)][:width]
        self.beams = [self.beams[one.parent].after(one) for one in going]
        self.ended = not going or self._is_decided()
        return [one.parent for one in going]

    def hypotheses(self) -> list[Hypothesis]:
        """The answer, best first."""
        return [self._hypothesis(one) for one in self._finished[: self._want.keep]]

    def _candidates(self, drawn: Sequence[Drawn]) -> list[Candidate]:
        """The most likely candidates of all beams together, most likely first."""
        tokens, values, sums, parents = [], [], [], []
        for index, (beam, one) in enumerate(zip(self.beams, drawn, strict=True)):
            assert one.candidates is not None
            own = np.frombuffer(one.candidates.top_values, "<f4")
            tokens.append(np.frombuffer(one.candidates.top_tokens, "<u4"))
            values.append(own)
            sums.append(own + beam.logprob)
            parents.append(np.full(len(own), index))
        all_tokens, all_sums = np.concatenate(tokens), np.concatenate(sums)
        all_parents, all_values = np.concatenate(parents), np.concatenate(values)
        order = np.argsort(-all_sums, kind="stable")[: self.candidate_count]
        return [
            Candidate(
                int(all_parents[at]), int(all_tokens[at]), float(all_values[at]), all_sums[at],
                drawn[all_parents[at]].scores,
            )
            for at in order.tolist()
            if np.isfinite(all_sums[at])
        ]  # fmt: skip

    def _ends(self, one: Candidate) -> bool:
        return one.token in self._stops or self.length >= self._tokens_max

    def _finish(self, ending: list[Candidate]) -> None:
        fresh = [
            Finished(self._score(one.whole, self.length), self.beams[one.parent].after(one))
            for one in ending
        ]
        ranked = sorted([*self._finished, *fresh], key=lambda one: -one.score)
        self._finished = ranked[: self._want.width]

    def _score(self, logprob: np.float32, length: int) -> float:
        weight: float = float(length) ** self._want.length_penalty
        return float(logprob) / weight

    def _is_decided(self) -> bool:
        """Whether the search stops, by ``early_stopping``, although there are beams left."""
        want = self._want
        if len(self._finished) < want.width:
            return False
        if want.early_stopping is True:
            return True
        hopeful = want.early_stopping == "never" and want.length_penalty > 0.0
        length = self._tokens_max if hopeful else self.length
        return self._score(self.beams[0].logprob, length) <= self._finished[-1].score

    def _hypothesis(self, finished: Finished) -> Hypothesis:
        path = finished.beam.path
        reported = [one.reported for one in path if one.reported is not None]
        last = path[-1].token
        stopped = last in self._stops
        finish: Finish = "stop" if stopped else "length"
        return Hypothesis(
            tokens=pack([one.token for one in path]),
            logprobs=TopLogprobs(
                chosen=np.array([one.logprob for one in path], "<f4").tobytes(),
                width=reported[0].width if reported else 0,
                top_tokens=b"".join(one.top_tokens for one in reported),
                top_values=b"".join(one.top_values for one in reported),
            ),
            score=finished.score,
            finish=finish,
            stop_token=last if stopped else None,
        )
