"""What gateway tests share: a tiny model folder and wire messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pagemesh.gateway.calls.events import Route, Worker
from pagemesh.gateway.calls.spec import RequestSpec
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.pager_messages import Waterfall
from pagemesh.wire.tokens import pack
from pagemesh.wire.work_messages import Finish, Frame, Sampling, TopLogprobs

MODEL = "tiny"
END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
REQUEST = "0123456789abcdef0123456789abcdef"
PREFILL = Worker("prefill-1", 11)
DECODE = Worker("decode-1", 21)
ROUTE = Route(PREFILL, DECODE, b"m" * 32, b"r" * 32, 0)


def byte_tokenizer() -> Tokenizer:
    """Byte-level: ids 0 to 255 are the alphabet's letters in order, then a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("an", "d")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer


def write_model(folder: Path) -> Path:
    """A model folder with the files that a gateway reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    end = tokenizer.token_to_id(END)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": end}))
    return folder


def spec(
    *,
    prompt: int = 8,
    choices: int = 1,
    max_tokens: int = 100,
    deadline_ms: int = 60_000,
    stop_tokens: tuple[int, ...] = (),
    own_stops: tuple[int, ...] = (),
    prompt_logprobs: bool = False,
) -> RequestSpec:
    """A request with a prompt of the ids 1, 2, 3, ..."""
    return RequestSpec(
        request=REQUEST,
        gateway="gateway-1",
        gateway_incarnation=1,
        priority=0,
        arrival_us=5,
        prompt=np.arange(1, prompt + 1, dtype="<u4"),
        choice_count=choices,
        sampling=Sampling(max_tokens=max_tokens, stop_tokens=list(stop_tokens)),
        deadline_ms=deadline_ms,
        own_stops=frozenset(own_stops),
        prompt_logprobs=prompt_logprobs,
    )


def frame(
    first: int,
    tokens: list[int],
    *,
    attempt: int = 1,
    choice: int = 0,
    finish: Finish | None = None,
    stop_token: int | None = None,
    logprobs: TopLogprobs | None = None,
    cached: int | None = None,
) -> Frame:
    """A frame of the request above."""
    fall = None if cached is None else Waterfall(delivered_tokens=cached)
    return Frame(
        key=SequenceKey(request=REQUEST, attempt=attempt, choice=choice),
        first_position=first,
        tokens=pack(tokens),
        finish=finish,
        stop_token=stop_token,
        logprobs=logprobs,
        waterfall=fall,
    )


async def eventually(claim: Callable[[], bool], *, within_s: float = 5.0) -> None:
    """Wait until ``claim`` holds; fails if it does not in time."""
    for _ in range(int(within_s / 0.01)):
        if claim():
            return
        await asyncio.sleep(0.01)
    assert claim(), f"not so within {within_s} s"
