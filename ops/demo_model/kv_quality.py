"""What fewer bits for K and V cost the demo model: perplexity and recall by type, by our engine.

    python -m ops.demo_model.kv_quality [--documents 60] [--probes 60] [--json kv_figures.json]

Every token attends to K and V as stored in pages. Documents and probes are those of
``ops.demo_model.evaluate``, the same ones for every type.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from ops.demo_model import corpus, dialogues, recall, stories, tokenizer
from ops.demo_model.pieces import END_OF_TEXT, IM_END, Document, Piece
from ops.demo_model.train import WEIGHTS
from torch.nn import functional

from pagemesh.engine.forward import Decoder
from pagemesh.engine.loading import LoadedModel, load_model
from pagemesh.kernels.layout import KV_DTYPES, KvDtype
from pagemesh.kernels.ops import KvPool, ragged_batch

PAGE_SIZE = 16
RECALL_GAPS_TOKENS = (100, 500, 1000)
RECALL_LINES = 16
K = TypeVar("K", bound=str)


@dataclass(frozen=True, slots=True)
class Scored:
    """A text whose tokens from ``first`` on are scored with teacher forcing, if ``counts`` is set
    for them."""

    ids: list[int]
    first: int
    counts: list[bool]


@dataclass(frozen=True, slots=True)
class Quality:
    """``logit_error``: root mean square difference of centred logits to those with float32 K and V;
    ``perplexity``: per token; ``recall``: the share of exact answers."""

    logit_error: float
    perplexity: float
    recall: float


def documents(count: int) -> list[Scored]:
    """Held-out documents, half stories and half chats. Scored are all tokens after the first that
    have full weight in the document."""
    tokens = tokenizer.load(WEIGHTS)

    def made(kind: str, number: int) -> Document:
        random = corpus.generator(f"{corpus.HELD_OUT_SEED} {kind}", number)
        if kind == "chat":
            return dialogues.chat(random)
        return (Piece(stories.story(random)), Piece(END_OF_TEXT))

    found = []
    for number in range(count):
        ids, weights = tokenizer.encode(tokens, made(("story", "chat")[number % 2], number // 2))
        found.append(Scored(ids, 1, [weight == 1.0 for weight in weights[1:]]))
    return found


def probes(count: int) -> list[Scored]:
    """Recall questions at the distances ``RECALL_GAPS_TOKENS`` in turn; the answer and its end
    token are scored."""
    tokens = tokenizer.load(WEIGHTS)
    found = []
    for number in range(count):
        gap = RECALL_GAPS_TOKENS[number % len(RECALL_GAPS_TOKENS)]
        random = corpus.generator(f"{corpus.HELD_OUT_SEED} {gap}", number)
        asked = recall.probe(random, gap, RECALL_LINES)
        prompt, answer = tokens.encode(asked.prompt), tokens.encode(asked.answer + IM_END)
        found.append(Scored(prompt + answer, len(prompt), [True] * len(answer)))
    return found


def measure(
    dtypes: Sequence[KvDtype], texts: Sequence[Scored], asked: Sequence[Scored]
) -> dict[KvDtype, Quality]:
    """Every type on the same texts and questions. The first must be float32."""
    if dtypes[0] != "float32":
        raise ValueError(f"the first type is {dtypes[0]}, not float32")
    with tempfile.TemporaryDirectory() as folder:
        found: dict[KvDtype, Quality] = {}
        exact: list[torch.Tensor] = []
        for dtype in dtypes:
            model = load_model(
                WEIGHTS, name="demo", page_size=PAGE_SIZE, cache=Path(folder), kv_dtype=dtype
            )
            found[dtype] = judge(model, texts, asked, exact)
    return found


@torch.inference_mode()
def judge(
    model: LoadedModel,
    texts: Sequence[Scored],
    asked: Sequence[Scored],
    exact: list[torch.Tensor],
) -> Quality:
    """The quality of ``model``. ``exact``: the logits to compare with; if it is empty, the model's
    own are stored in it."""
    decoder = Decoder(model.config, model.weights, deterministic=True)
    logits = [_centred(part) for part in _logits(model, decoder, texts)]
    exact[:] = exact or logits
    return Quality(
        logit_error=_root_mean_square(logits, exact),
        perplexity=_perplexity(logits, texts),
        recall=_recalled(_logits(model, decoder, asked), asked),
    )


def _logits(
    model: LoadedModel, decoder: Decoder, texts: Sequence[Scored]
) -> Iterator[torch.Tensor]:
    """For each text, float32 [scored tokens, vocab]: the logits that predict each scored token."""
    for text in texts:
        count = len(text.ids) - 1
        table = np.arange(-(-count // PAGE_SIZE), dtype=np.uint32)
        pool = KvPool.allocate(model.layout, len(table))
        batch = ragged_batch([table], [0], [count], PAGE_SIZE)
        wanted = torch.arange(text.first - 1, count)
        hidden = decoder.hidden(torch.tensor(text.ids[:-1]), batch, wanted, pool)
        yield decoder.logits(hidden)


def _centred(logits: torch.Tensor) -> torch.Tensor:
    return logits - logits.mean(-1, keepdim=True)


def _root_mean_square(logits: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    squares = sum(float((a - b).square().sum()) for a, b in zip(logits, exact, strict=True))
    return math.sqrt(squares / sum(part.numel() for part in exact))


def _perplexity(logits: list[torch.Tensor], texts: Sequence[Scored]) -> float:
    total, counted = 0.0, 0
    for part, text in zip(logits, texts, strict=True):
        losses = functional.cross_entropy(
            part, torch.tensor(text.ids[text.first :]), reduction="none"
        )
        counts = torch.tensor(text.counts)
        total += float(losses[counts].sum())
        counted += int(counts.sum())
    return math.exp(total / counted)


def _recalled(logits: Iterator[torch.Tensor], asked: Sequence[Scored]) -> float:
    """An answer is exact if each of its tokens is the most likely one after those before it."""
    right = sum(
        part.argmax(-1).tolist() == text.ids[text.first :]
        for part, text in zip(logits, asked, strict=True)
    )
    return right / len(asked)


def main() -> None:
    """Print the figures as a Markdown table."""
    report("K and V", partial(measure, KV_DTYPES))


def report(
    what: str, measured: Callable[[Sequence[Scored], Sequence[Scored]], Mapping[K, Quality]]
) -> None:
    """Parse the command line, call ``measured`` and print the qualities by type of ``what`` as a
    Markdown table; ``--json`` also writes them to a file."""
    parser = argparse.ArgumentParser(description=f"Perplexity and recall by type of {what}.")
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--probes", type=int, default=60)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    found = measured(documents(arguments.documents), probes(arguments.probes))
    print(f"| {what} | perplexity | exact recall | logit error, root mean square |")
    print("| --- | --- | --- | --- |")
    for kind, one in found.items():
        print(
            f"| {kind} | {one.perplexity:.4f} | {100 * one.recall:.1f} % | {one.logit_error:.1e} |"
        )
    if arguments.json is not None:
        lines = {
            kind: {
                "perplexity": round(one.perplexity, 5), "recall": round(one.recall, 4),
                "logit_error": float(f"{one.logit_error:.2e}"),
            }
            for kind, one in found.items()
        }  # fmt: skip
        kept = {"documents": arguments.documents, "probes": arguments.probes, "by_type": lines}
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
