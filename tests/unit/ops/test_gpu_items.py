"""What is checked and timed on a GPU, small and in Triton's interpreter: it runs and is right."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ops.bench.gpu_attention import Case, TorchAttention, cases, exact
from ops.bench.gpu_items import items
from ops.bench.gpu_rig import Limits, Rig, difference, distance

TRIAL = Rig(is_trial=True)
ITEMS = items(TRIAL)
KERNELS = (
    "decode attention", "prefill attention", "merge_states", "kv_write", "rope_kv_write",
    "page_copy", "rms_norm", "add_rms_norm", "silu_mul", "rope", "quantise", "dequantise",
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def test_what_is_no_number_is_infinitely_far_from_what_was_expected() -> None:
    wrong = torch.tensor([1.0, float("nan")])
    for far in (difference, distance):
        assert far(wrong, torch.ones(2)) == float("inf")
        assert far(torch.ones(2), torch.ones(2)) == 0.0


def different() -> list[str]:
    """Items, but of attention only one of those that are alike when they are small."""
    small = {case.fitted(TRIAL): case.name for case in cases()}
    return [name for name in ITEMS if "attention" not in name or name in small.values()]


@pytest.mark.parametrize("name", different())
def test_an_item_is_right_and_takes_its_time(name: str) -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        line = ITEMS[name](Limits(1e9, 1e9, 1e9)).line()
    assert line["ok"], line
    assert line["ms"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_of_the_forward_pass_is_among_them(kernel: str) -> None:
    assert [name for name in ITEMS if name.startswith(kernel)]


def test_every_type_width_group_and_limit_of_attention_is_among_them() -> None:
    for kind in ("decode", "prefill"):
        found = [case for case in cases() if case.kind == kind]
        types = {(case.queries, case.pages) for case in found}
        assert {
            (torch.float32, "float32"), (torch.bfloat16, "float32"), (torch.float16, "float16"),
            (torch.bfloat16, "bfloat16"), (torch.bfloat16, "int8"), (torch.bfloat16, "e4m3"),
        } <= types  # fmt: skip
        assert {case.head_dim for case in found} >= {64, 128, 256}
        assert {case.group for case in found} >= {1, 4, 8}
        assert not all(case.is_plain for case in found)


@pytest.mark.parametrize("queries", [torch.float32, torch.float16])
@pytest.mark.parametrize("past", [0, 7])
def test_torch_beside_it_sees_the_past_and_no_more(queries: torch.dtype, past: int) -> None:
    case = Case("prefill", "float16", 2, past, 5, queries=queries, kv_heads=2)
    q = torch.randn(10, case.heads, case.head_dim).to(queries)
    k, v = torch.randn(2, 2, 2, case.context, case.head_dim)
    got = TorchAttention(case, q, k, v)()
    expected = exact(case, q, k.to(queries).float(), v.to(queries).float())
    torch.testing.assert_close(got.float(), expected, rtol=1e-2, atol=2e-3)


def test_a_window_is_no_item_of_torchs_and_counts_less_to_read_and_to_do() -> None:
    whole = Case("prefill", "bfloat16", 1, 100, 10)
    windowed = replace(whole, window_tokens=20)
    assert whole.is_plain
    assert not windowed.is_plain
    assert whole.seen == sum(range(101, 111))
    assert windowed.seen == 10 * 20


def test_a_trial_needs_no_setting() -> None:
    """Triton reads the interpreter's when it is imported, which nothing may do before."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    asked = ["ops.bench.gpu", "--trial", "--parts", "kernels", "--only", "rms_norm"]
    done = subprocess.run(
        [sys.executable, "-m", *asked], cwd=Path(__file__).parents[3], env=own,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rms_norm  ok True" in done.stdout
