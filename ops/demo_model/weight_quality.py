"""What rounding weights and rows costs the demo model: perplexity, recall, logits, by our engine.

    python -m ops.demo_model.weight_quality [--documents 60] [--probes 60]
        [--json weight_figures.json]

Documents and questions are those of ``ops.demo_model.kv_quality``; K and V are float32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from ops.demo_model.kv_quality import PAGE_SIZE, Quality, Scored, judge, report
from ops.demo_model.train import WEIGHTS

from pagemesh.engine.loading import load_model
from pagemesh.kernels.weight_types import AskedType

KINDS: tuple[AskedType, ...] = ("float32", "bfloat16", "int8")
"""The checkpoint is in bfloat16, so with that type only the multiplied rows are rounded."""


def measure(texts: Sequence[Scored], asked: Sequence[Scored]) -> dict[AskedType, Quality]:
    """Every type of weights on the same texts and questions, against float32."""
    found: dict[AskedType, Quality] = {}
    exact: list[torch.Tensor] = []
    with tempfile.TemporaryDirectory() as folder:
        for weight_type in KINDS:
            model = load_model(
                WEIGHTS, name="demo", page_size=PAGE_SIZE, cache=Path(folder),
                weight_type=weight_type,
            )  # fmt: skip
            found[weight_type] = judge(model, texts, asked, exact)
    return found


def main() -> None:
    """Print the figures as a Markdown table."""
    report("weights", measure)


if __name__ == "__main__":
    main()
