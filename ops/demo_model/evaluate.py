"""Held-out perplexity and recall by distance of the demo model, as a table and as JSON.

    python -m ops.demo_model.evaluate
    python -m ops.demo_model.evaluate --probes 200 --json figures.json

Documents and probes come from seeds that training never draws. An answer counts only if greedy
decoding gives it whole, with the end mark after it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ops.demo_model import corpus, dialogues, stories, tokenizer
from ops.demo_model.measure import perplexity, recall_accuracy
from ops.demo_model.pieces import END_OF_TEXT, Document, Piece
from ops.demo_model.train import WEIGHTS
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

GAPS = (100, 250, 500, 1000, 1500, 2000, 3000)
LINE_COUNTS = (16, 64)
DOCUMENTS = 200


def _documents(kind: str, make: Callable[[Any], Document]) -> list[Document]:
    return [
        make(corpus.generator(f"{corpus.HELD_OUT_SEED} {kind}", number))
        for number in range(DOCUMENTS)
    ]


def measure(
    model: LlamaForCausalLM, tokens: PreTrainedTokenizerFast, probes: int
) -> dict[str, Any]:
    """All figures of one model."""
    plain = _documents("story", lambda rng: (Piece(stories.story(rng)), Piece(END_OF_TEXT)))
    chats = _documents("chat", dialogues.chat)
    recalled = {}
    for line_count in LINE_COUNTS:
        # The asked line may be the first, so the whole list must fit into the distance.
        gaps = [gap for gap in GAPS if gap >= 7 * line_count - 16]
        found = recall_accuracy(model, tokens, gaps, probes, corpus.HELD_OUT_SEED, line_count)
        recalled[str(line_count)] = {str(gap): share for gap, share in found.items()}
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "perplexity": {
            "stories": round(perplexity(model, tokens, plain), 3),
            "chat_replies": round(perplexity(model, tokens, chats), 3),
        },
        "recall_probes": probes,
        "recall_by_lines_and_tokens_back": recalled,
    }


def table(figures: dict[str, Any]) -> str:
    """The figures as Markdown."""
    rows = ["| held-out text | perplexity per token |", "| --- | --- |"]
    rows += [
        f"| {kind.replace('_', ' ')} | {value:.2f} |"
        for kind, value in figures["perplexity"].items()
    ]
    rows += ["", "| tokens back | " + " | ".join(f"{n} lines" for n in LINE_COUNTS) + " |"]
    rows.append("| --- |" + " --- |" * len(LINE_COUNTS))
    by_lines = figures["recall_by_lines_and_tokens_back"]
    for gap in GAPS:
        shares = [by_lines[str(count)].get(str(gap)) for count in LINE_COUNTS]
        cells = ["-" if share is None else f"{100 * share:.1f} %" for share in shares]
        rows.append(f"| {gap} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    """Evaluate the bundled weights, or those of another folder."""
    parser = argparse.ArgumentParser(description="Evaluate the demo model.")
    parser.add_argument("--model", type=Path, default=WEIGHTS)
    parser.add_argument("--probes", type=int, default=100, help="questions per distance")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = LlamaForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, local_files_only=True
    )
    model.eval()
    figures = measure(model, tokenizer.load(arguments.model), arguments.probes)
    print(table(figures))
    text = json.dumps(figures, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
