"""What is asked for reaches workers as it was said: the prompt's tokens, how to draw, how long."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from llguidance import grammar_from
from tests.unit.gateway.support import byte_tokenizer
from tests.unit.gateway.test_openai_api import FACTS, chat, completion
from tokenizers import processors

from pagemesh.gateway.api.api_errors import ApiError
from pagemesh.gateway.api.openai_api import Ask
from pagemesh.gateway.calls.prepare import fit, tokenise
from pagemesh.gateway.words.templates import ChatTemplate
from pagemesh.gateway.words.tokens import Tokens
from pagemesh.wire.work_messages import ENDS_MAX, Beams, Sampling

SAID: dict[str, tuple[dict[str, Any], Any]] = {
    "temperature": ({"temperature": 0.25}, 0.25),
    "top_k": ({"top_k": 7}, 7),
    "top_p": ({"top_p": 0.5}, 0.5),
    "min_p": ({"min_p": 0.125}, 0.125),
    "presence_penalty": ({"presence_penalty": 0.5}, 0.5),
    "frequency_penalty": ({"frequency_penalty": -0.5}, -0.5),
    "repetition_penalty": ({"repetition_penalty": 1.5}, 1.5),
    "logit_bias": ({"logit_bias": {"5": -1.5, "7": 100}}, {5: -1.5, 7: 100.0}),
    "seed": ({"seed": 9}, 9),
    "max_tokens": ({"max_tokens": 20}, 20),
    "min_tokens": ({"min_tokens": 3}, 3),
    "stop_tokens": ({"stop_token_ids": [7, 5]}, [3, 5, 7]),
    "logprobs": ({"logprobs": True, "top_logprobs": 4}, 4),
    "grammar": ({"structured_outputs": {"regex": "a+"}}, grammar_from("regex", "a+")),
    "beams": ({"use_beam_search": True, "beam_width": 3}, Beams(width=3, keep=1)),
}
"""What a body says, and what workers get, by the names that these have; 3 is an end token."""


@pytest.mark.parametrize("name", [field.name for field in msgspec.structs.fields(Sampling)])
def test_workers_get_what_a_body_says_of_how_to_draw(name: str) -> None:
    fields, expected = SAID[name]
    (work,) = fit(chat(**fields), [np.ones(10, "<u4")], FACTS, frozenset({3}), seed=1)
    assert getattr(work.sampling, name) == expected
    (other,) = fit(chat(), [np.ones(10, "<u4")], FACTS, frozenset({3}), seed=1)
    assert getattr(other.sampling, name) != expected, "it is not what everybody gets"


@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), [(80, 0), (79, 1)])
def test_a_prompt_may_fill_the_context_with_its_answer_to_the_last_token(
    prompt_tokens: int, max_tokens: int
) -> None:
    def fitted(more_tokens: int) -> int:
        ask = completion(max_tokens=max_tokens, echo=True)
        prompt = np.ones(prompt_tokens + more_tokens, "<u4")
        (work,) = fit(ask, [prompt], FACTS, frozenset(), seed=1)
        return work.sampling.max_tokens

    assert fitted(0) == max_tokens
    with pytest.raises(ApiError, match="context length is 80"):
        fitted(1)


@pytest.mark.parametrize("said", ["this model's maximum context length is", "prompt is too long"])
def test_clients_know_too_long_a_prompt_by_the_words_of_one_library_or_another(said: str) -> None:
    with pytest.raises(ApiError, match=said):
        fit(chat(), [np.ones(81, "<u4")], FACTS, frozenset(), seed=1)


def test_a_search_has_no_more_pages_than_its_tenant() -> None:
    prompt = np.ones(10, "<u4")
    ask = completion(use_beam_search=True, beam_width=2, max_tokens=16)
    assert fit(ask, [prompt], FACTS, frozenset(), seed=1)
    assert fit(ask, [prompt], FACTS, frozenset(), seed=1, quota_tokens=64)
    with pytest.raises(ApiError, match=r"64 token slots.* 48:") as caught:
        fit(ask, [prompt], FACTS, frozenset(), seed=1, quota_tokens=48)
    assert caught.value.code == "quota_exceeded" and "your quota" in str(caught.value)


# The prompt's tokens ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    """Words whose tokenizer puts ``<s>`` before what it is given, as most do."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<s>"])
    first = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[first]
    )
    source = (
        "{{ mood }}:{% for message in messages %}{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return Tokens(tokenizer, template=ChatTemplate(source, {}), end_tokens=frozenset())


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (completion(), "<s>hi"),
        (completion(add_special_tokens=False), "hi"),
        (chat(), ":hi[assistant]"),
        (chat(add_special_tokens=True), "<s>:hi[assistant]"),
        (chat(add_generation_prompt=False), ":hi"),
        (chat(chat_template_kwargs={"mood": "calm"}), "calm:hi[assistant]"),
        (
            chat(messages=[{"role": "assistant", "content": "Well"}], continue_final_message=True),
            ":Well",
        ),
    ],
)
def test_a_prompt_is_made_as_its_body_says(tokens: Tokens, ask: Ask, text: str) -> None:
    (prompt,) = tokenise(ask, tokens, None, b"")
    assert tokens.decode(prompt.tolist()) == text


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_too_long_an_answer_is_refused_by_the_name_it_was_asked_for(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        fit(chat(**{name: 1_000}), [np.ones(10, "<u4")], FACTS, frozenset(), seed=1)
    assert caught.value.param == name and f"that {name} may be 70 at most" in caught.value.message
    with pytest.raises(ApiError, match=f"min_tokens 9 exceeds {name} 8"):
        chat(**{name: 8, "min_tokens": 9})


def test_no_end_of_an_answer_is_left_out_in_silence() -> None:
    prompt, ends = np.ones(10, "<u4"), frozenset(range(100, 120))
    for count in (44, 45):
        ask = chat(stop_token_ids=list(range(count)))
        if count + len(ends) <= ENDS_MAX:
            (work,) = fit(ask, [prompt], FACTS, ends, seed=1)
            assert ends < set(work.sampling.stop_tokens)
            continue
        with pytest.raises(ApiError, match="65 tokens would end an answer; the limit is 64"):
            fit(ask, [prompt], FACTS, ends, seed=1)


def test_an_answer_that_any_token_ends_cannot_have_a_least_length() -> None:
    facts = msgspec.structs.replace(FACTS, vocab_tokens=4)
    ask = chat(stop_token_ids=[0, 1, 2], min_tokens=1)
    prompt = np.ones(10, "<u4")
    assert fit(ask, [prompt], facts, frozenset(), seed=1)
    with pytest.raises(ApiError) as caught:
        fit(ask, [prompt], facts, frozenset({3}), seed=1)
    assert (caught.value.status, caught.value.param) == (400, "min_tokens")
