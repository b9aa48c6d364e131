"""What int8 weights cost the demo model: perplexity, recall and logits, by our engine.

    python -m ops.demo_model.weight_quality [--documents 60] [--probes 60]
        [--json weight_figures.json]

Documents and questions are those of ``ops.demo_model.kv_quality``; K and V are float32.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from ops.demo_model.kv_quality import (
    PAGE_SIZE,
    Quality,
    Scored,
    documents,
    judge,
    keep,
    probes,
    tell,
)
from ops.demo_model.train import WEIGHTS

from pagemesh.engine.loading import load_model
from pagemesh.kernels.weight_types import WEIGHT_TYPES, WeightType


def measure(texts: Sequence[Scored], asked: Sequence[Scored]) -> dict[WeightType, Quality]:
    """Every type of weights on the same texts and questions, against float32."""
    found: dict[WeightType, Quality] = {}
    exact: list[torch.Tensor] = []
    with tempfile.TemporaryDirectory() as folder:
        for weight_type in WEIGHT_TYPES:
            model = load_model(
                WEIGHTS, name="demo", page_size=PAGE_SIZE, cache=Path(folder),
                weight_type=weight_type,
            )  # fmt: skip
            found[weight_type] = judge(model, texts, asked, exact)
    return found


def main() -> None:
    """Print the figures as a Markdown table."""
    parser = argparse.ArgumentParser(description="Perplexity and recall by type of weights.")
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--probes", type=int, default=60)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    found = measure(documents(arguments.documents), probes(arguments.probes))
    tell("weights", found.items())
    if arguments.json is not None:
        measured = {"documents": arguments.documents, "probes": arguments.probes}
        keep(arguments.json, measured, found.items())


if __name__ == "__main__":
    main()
