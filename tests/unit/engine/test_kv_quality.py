"""What fewer bits for K and V may cost the demo model, and what its card tells of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from ops.demo_model.kv_quality import documents, measure, probes
from ops.demo_model.weight_quality import KINDS

from pagemesh.kernels.layout import KV_DTYPES, KvDtype

LOGIT_ERROR_MAX: dict[KvDtype, float] = {
    "float16": 2e-3, "bfloat16": 1.2e-2, "int8": 3e-2, "e4m3": 0.16,
}  # fmt: skip
PERPLEXITY_RATIO_MAX: dict[KvDtype, float] = {
    "float16": 1.0005, "bfloat16": 1.001, "int8": 1.003, "e4m3": 1.01,
}  # fmt: skip
ANSWERS_LOST_MAX: dict[KvDtype, int] = {"float16": 0, "bfloat16": 0, "int8": 0, "e4m3": 1}
PROBES = 9
FOLDER = Path(__file__).parents[3] / "ops" / "demo_model"


@pytest.mark.timeout(240)
def test_the_demo_model_keeps_its_perplexity_and_recall_with_every_kv_type() -> None:
    found = measure(KV_DTYPES, documents(10), probes(PROBES))
    exact = found["float32"]
    assert exact.logit_error == 0.0
    assert exact.recall > 0.5, "there is something to lose"
    errors = [found[dtype].logit_error for dtype in KV_DTYPES]
    assert errors == sorted(set(errors)), "each type has fewer bits than the one before it"
    for dtype, limit in LOGIT_ERROR_MAX.items():
        one = found[dtype]
        assert one.logit_error <= limit, dtype
        assert one.perplexity <= exact.perplexity * PERPLEXITY_RATIO_MAX[dtype], dtype
        assert one.recall >= exact.recall - ANSWERS_LOST_MAX[dtype] / PROBES - 1e-9, dtype


@pytest.mark.parametrize(
    ("figures", "first_columns", "kinds"),
    [
        ("kv_figures.json", r"(\w+) \| [\d,]+", KV_DTYPES),
        ("weight_figures.json", r"`--dtype (\w+)`", KINDS),
    ],
)
def test_the_model_card_tells_the_figures_that_were_measured(
    figures: str, first_columns: str, kinds: Sequence[str]
) -> None:
    measured = json.loads((FOLDER / figures).read_text())["by_type"]
    row = rf"^\| {first_columns} \| ([\d.]+) \| ([\d.]+) % \| ([\d.]+) \|$"
    told = re.findall(row, (FOLDER / "MODEL_CARD.md").read_text(), re.M)
    assert [kind for kind, *_ in told] == list(kinds) == list(measured)
    for kind, perplexity, recall, logit_error in told:
        one = measured[kind]
        assert float(perplexity) == pytest.approx(one["perplexity"], abs=6e-5), kind
        assert float(recall) == round(100 * one["recall"], 1), kind
        assert float(logit_error) == pytest.approx(one["logit_error"], rel=0.06), kind
