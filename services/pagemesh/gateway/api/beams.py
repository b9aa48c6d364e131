"""The parameters of a beam search, and whether it fits the page pool. Pure.

Whatever is wrong raises ``ApiError`` that names the parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagemesh.gateway.api.api_errors import ApiError, bad, unsupported
from pagemesh.gateway.api.openai_types import Common
from pagemesh.wire.work_messages import BEAMS_MAX, Beams

if TYPE_CHECKING:
    from pagemesh.gateway.api.openai_api import Ask

DEFAULT_WIDTH = 4
_TAKES_SEARCH = {"beam_width": None, "early_stopping": False}
_DRAWS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 1.0), "top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,),
    "presence_penalty": (0.0,), "frequency_penalty": (0.0,), "repetition_penalty": (1.0,),
    "logit_bias": ({},),
}  # fmt: skip
"""Parameters for drawing tokens, with the values that a search accepts, since it draws none."""


def beams_of(form: Common, *, scores_prompt: bool) -> Beams | None:
    """The beam search that ``form`` asks for; None if it asks for none. Raises ``ApiError``."""
    if not form.use_beam_search:
        for name, default in _TAKES_SEARCH.items():
            if getattr(form, name) not in (None, default):
                raise bad(name, f"{name} requires use_beam_search: true")
        return None
    for name, values in _DRAWS.items():
        value = getattr(form, name)
        if value is not None and value not in values:
            raise bad(
                name, f"{name} does not apply to a beam search, which does not sample: leave it out"
            )
    if form.stream:
        raise bad("stream", "a beam search cannot be streamed: leave stream out")
    if scores_prompt:
        raise unsupported("echo", "echo with logprobs in a beam search")
    if form.max_tokens == 0:
        raise bad("max_tokens", "a beam search requires max_tokens of at least 1")
    n = form.n or 1
    return Beams(
        width=_width(form, n),
        keep=n,
        length_penalty=1.0 if form.length_penalty is None else form.length_penalty,
        early_stopping=False if form.early_stopping is None else form.early_stopping,
    )


def _width(form: Common, n: int) -> int:
    name = "best_of" if form.beam_width is None and form.best_of is not None else "beam_width"
    width = form.best_of if name == "best_of" else form.beam_width
    if width is None:
        name, width = "n", max(n, DEFAULT_WIDTH)
    if form.best_of not in (None, width):
        raise bad("best_of", f"best_of {form.best_of} and beam_width {width} differ: give only one")
    if width < n:
        raise bad(name, f"{name} {width} is less than n {n}: raise {name} or lower n")
    if width > BEAMS_MAX:
        raise bad(name, f"{name} {width} exceeds the limit of {BEAMS_MAX} beams")
    return width


def fit_beams(
    ask: Ask, beams: Beams, prompt_tokens: int, max_tokens: int,
    *, pool_pages: int, quota_pages: int, page_size: int,
) -> int:  # fmt: skip
    """How many tokens each beam may have: ``max_tokens``, or what fits the pool and the tenant's
    quota when the client set no limit. Raises ``ApiError`` if the search does not fit."""
    pages = min(pool_pages, quota_pages)
    if ask.max_tokens is None:
        shared = (prompt_tokens - 1) // page_size
        each = (pages - shared) // beams.width
        max_tokens = min(max_tokens, (shared + each) * page_size - prompt_tokens + 1)
    needed = beams.pages_max(prompt_tokens, max(max_tokens, 1), page_size)
    if needed > pages or max_tokens < 1:
        there, code = f"there are only {pages * page_size}", "context_length_exceeded"
        if quota_pages < pool_pages:
            there, code = f"your quota is {pages * page_size}", "quota_exceeded"
        message = (
            f"{beams.width} beams may need {needed * page_size} token slots, but {there}: lower "
            f"{ask.max_tokens_name} or beam_width"
        )
        raise ApiError(400, message, "beam_width", code)
    return max_tokens
