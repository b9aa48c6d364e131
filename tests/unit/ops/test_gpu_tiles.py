"""Tiles that are compared on a GPU: which they are, and that they are what attention is given."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from ops.bench.gpu_attention import Attention, Case, cases
from ops.bench.gpu_rig import Rig, difference
from ops.bench.gpu_tiles import candidates, own_tile, tile_of

from pagemesh.kernels.ops import KvPool
from pagemesh.kernels.paged_attention import triton as paged_attention
from pagemesh.kernels.paged_attention.tiles import Tile
from pagemesh.kernels.paged_prefill import triton as paged_prefill

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
TRIAL = Rig(is_trial=True)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_the_tile_in_use_is_the_first_of_different_ones(case: Case) -> None:
    own = own_tile(case)
    found = candidates(case, own)
    assert found[0] == own and len(set(found)) == len(found) >= 27


@pytest.mark.parametrize(
    ("kind", "module"), [("decode", paged_attention), ("prefill", paged_prefill)]
)
def test_attention_is_taken_on_the_tile_that_is_tried(
    kind: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Tile] = []
    shape = module.attention_shape

    def noted(q: torch.Tensor, pool: KvPool, tile: Tile, **limits: Any) -> object:
        given.append(tile)
        return shape(q, pool, tile, **limits)

    monkeypatch.setattr(module, "attention_shape", noted)
    case = next(case for case in cases() if case.kind == kind).fitted(TRIAL)
    attend, tried = Attention(TRIAL, case), Tile(16, 16, 4, 2)
    expected = attend()
    with tile_of(case, tried):
        assert difference(attend(), expected) < 0.01
    attend()
    assert given == [given[0], tried, given[0]] and given[0] != tried
