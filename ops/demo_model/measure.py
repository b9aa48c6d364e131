"""Measures shared by training and evaluation: exact recall by distance, and perplexity."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from ops.demo_model import corpus, recall
from ops.demo_model.pieces import IM_END, Document
from ops.demo_model.tokenizer import encode
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def answers_exactly(
    model: LlamaForCausalLM, tokens: PreTrainedTokenizerFast, prompt: str, answer: str
) -> bool:
    """Whether greedy decoding writes exactly `answer` and stops.

    One forward pass over prompt and answer is enough: the greedy continuation is the answer if and
    only if every answer token is the most likely one after the tokens before it.
    """
    prompt_ids = tokens.encode(prompt)
    answer_ids = tokens.encode(answer + IM_END)
    ids = torch.tensor([prompt_ids + answer_ids])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(answer_ids) + 1).logits
    best = logits[0, :-1].argmax(dim=-1).tolist()
    return bool(best == answer_ids)


def recall_accuracy(
    model: LlamaForCausalLM,
    tokens: PreTrainedTokenizerFast,
    gaps: Sequence[int],
    count: int,
    split: str,
    line_count: int = 16,
) -> dict[int, float]:
    """The share of exact answers for each distance in tokens, over `count` probes each."""
    found = {}
    for gap in gaps:
        right = 0
        for number in range(count):
            asked = recall.probe(corpus.generator(f"{split} {gap}", number), gap, line_count)
            right += answers_exactly(model, tokens, asked.prompt, asked.answer)
        found[gap] = right / count
    return found


def perplexity(
    model: LlamaForCausalLM, tokens: PreTrainedTokenizerFast, documents: Sequence[Document]
) -> float:
    """Perplexity per token, over the tokens that have full weight in their documents."""
    total, counted = 0.0, 0.0
    for document in documents:
        ids, weights = encode(tokens, document)
        row = torch.tensor([ids])
        full = torch.tensor(weights[1:]).eq(1.0).float()
        with torch.inference_mode():
            logits = model(input_ids=row[:, :-1], use_cache=False).logits
        losses = functional.cross_entropy(logits[0].float(), row[0, 1:], reduction="none")
        total += float((losses * full).sum())
        counted += float(full.sum())
    return math.exp(total / counted)
