"""Which of the choices that were made are given."""

from __future__ import annotations

import json

import numpy as np

from pagemesh.gateway.api.openai_api import parse_completion
from pagemesh.gateway.api.render import Collector
from pagemesh.gateway.api.scores import Written
from pagemesh.gateway.calls.events import ChoiceEnded, Deliver
from pagemesh.wire.work_messages import TopLogprobs


def unasked(token: int) -> Written:
    raise AssertionError(f"nobody asked to see the score of {token}")


def collected(
    logprobs: list[list[float]], *, n: int, hidden: int = 0, lost: list[int] | None = None,
    **more: float,
) -> Collector:  # fmt: skip
    """Of one prompt, a choice for each list; the text of a choice is its number. ``lost``: tokens
    of each that come without scores, as those do that a worker tells again."""
    body = {"prompt": "x", "n": n, "best_of": len(logprobs), **more}
    made = Collector(parse_completion(json.dumps(body).encode(), served="tiny"), unasked)
    for choice, own in enumerate(logprobs):
        scores = TopLogprobs(chosen=np.array(own, "<f4").tobytes())
        ids = np.arange(len(own), dtype="<u4")
        made.delivered(0, Deliver(choice, 0, ids, str(choice), scores, hidden))
        lost_ids = np.arange(lost[choice] if lost else 0, dtype="<u4")
        made.delivered(0, Deliver(choice, len(own), lost_ids, "", None, 0))
        made.ended(0, ChoiceEnded(choice, "stop", None, ""))
    return made


def given(made: Collector) -> list[str]:
    return ["".join(one.texts) for one in made.given]


def test_the_best_has_the_highest_log_probability_of_the_whole_answer() -> None:
    assert given(collected([[-1.0], [-0.5, -0.5, -0.5], [-0.9]], n=2)) == ["2", "0"]


def test_with_a_penalty_for_length_the_likeliest_by_token_is_the_best() -> None:
    made = [[-1.0], [-0.5, -0.5, -0.5], [-0.9]]
    assert given(collected(made, n=2, length_penalty=0)) == ["2", "0"]
    assert given(collected(made, n=2, length_penalty=1)) == ["1", "2"]
    assert given(collected(made, n=2, length_penalty=2)) == ["1", "2"]
    assert given(collected([[-1.0], []], n=1, length_penalty=-1)) == ["1"]


def test_the_end_token_counts_although_nobody_sees_it() -> None:
    assert given(collected([[-1.0, -9.0], [-2.0, -2.0]], n=1, hidden=1)) == ["1"]


def test_tokens_without_scores_count_as_much_as_the_others() -> None:
    assert given(collected([[-0.5], [-0.4, -0.4]], n=1, lost=[3, 0])) == ["1"]
    assert given(collected([[], [-9.0]], n=1, lost=[2, 0])) == ["1"], "nothing speaks for it"


def test_of_equals_the_first_made_comes_first() -> None:
    assert given(collected([[-1.0], [-2.0], [-1.0]], n=2)) == ["0", "2"]


def test_choices_that_are_all_given_keep_their_order() -> None:
    assert given(collected([[-2.0], [-1.0]], n=2)) == ["0", "1"]
