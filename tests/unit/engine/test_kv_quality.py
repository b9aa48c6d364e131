"""What fewer bits for K and V may cost the demo model."""

from __future__ import annotations

import pytest
from ops.demo_model.kv_quality import documents, measure, probes

from pagemesh.kernels.layout import KV_DTYPES, KvDtype

LOGIT_ERROR_MAX: dict[KvDtype, float] = {
    "float16": 2e-3, "bfloat16": 1.2e-2, "int8": 3e-2, "e4m3": 0.16,
}  # fmt: skip
PERPLEXITY_RATIO_MAX: dict[KvDtype, float] = {
    "float16": 1.0005, "bfloat16": 1.001, "int8": 1.003, "e4m3": 1.01,
}  # fmt: skip
ANSWERS_LOST_MAX: dict[KvDtype, int] = {"float16": 0, "bfloat16": 0, "int8": 0, "e4m3": 1}
PROBES = 9


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
