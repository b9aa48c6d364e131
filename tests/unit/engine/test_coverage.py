"""What people are told about models is what the engine does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.engine.fallback_twins import save_fallback_twin

from pagemesh.engine.coverage import FALLBACK_TESTED, LEAN, path_of
from pagemesh.engine.fallback import FallbackDecoder
from pagemesh.engine.opening import has_lean_path, open_model
from pagemesh.wire.errors import ConfigError

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
MODELS_PAGE = Path(__file__).parents[3] / "ops" / "docs" / "models.md"


def test_what_only_transformers_reads_out_of_a_configuration_takes_the_fallback(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    twin = save_fallback_twin(folder, "LlamaForCausalLM")
    fields = json.loads((folder / "config.json").read_text())
    del fields["rope_parameters"]
    fields["rope_scaling"] = {"rope_type": "default", "partial_rotary_factor": 0.5}
    (folder / "config.json").write_text(json.dumps(fields))
    assert has_lean_path(folder), "as it is written"
    model, decoder = open_model(
        folder, name="tiny", page_size=16, cache=tmp_path / "cache", deterministic=False
    )
    assert isinstance(decoder, FallbackDecoder)
    assert model.config.layer_count == twin.config.num_hidden_layers


def test_the_table_of_models_has_each_tested_architecture_with_its_path() -> None:
    rows = re.findall(
        r"^\| `(\w+(?:ForCausalLM|LMHeadModel))` \| (\w+) \|", MODELS_PAGE.read_text(), re.M
    )
    expected = [(name, "lean") for name in LEAN] + [(name, "fallback") for name in FALLBACK_TESTED]
    assert rows == expected


@pytest.mark.parametrize(
    ("architecture", "fields", "path"),
    [
        ("LlamaForCausalLM", {}, "lean"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "fallback"),
        ("LlamaForCausalLM", {"sliding_window": 8}, "lean"),
        ("MistralForCausalLM", {"sliding_window": 8}, "fallback"),
        ("MistralForCausalLM", {"sliding_window": None}, "lean"),
        ("MistralForCausalLM", {"sliding_window": 8192}, "lean"),
        ("MistralForCausalLM", {"sliding_window": 8192, "rope_scaling": YARN}, "fallback"),
        ("MistralForCausalLM", {}, "fallback"),
        ("Phi3ForCausalLM", {"sliding_window": 8192}, "lean"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.75}, "fallback"),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, "lean"),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, "fallback"),
        ("Qwen3ForCausalLM", {"layer_types": ["sliding_attention"]}, "fallback"),
        ("Gemma2ForCausalLM", {}, "fallback"),
        ("HunYuanDenseV1ForCausalLM", {"use_cla": False, "cla_share_factor": 2}, "fallback"),
    ],
)
def test_a_configuration_takes_the_path_that_can_run_it(
    architecture: str, fields: dict[str, Any], path: str
) -> None:
    source = SimpleNamespace(architectures=[architecture], max_position_embeddings=8192, **fields)
    assert path_of(source, "model here") == path


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("architectures", {"architectures": "LlamaForCausalLM"}),
        ("layer_types", {"architectures": ["LlamaForCausalLM"], "layer_types": "full_attention"}),
    ],
)
def test_a_text_where_a_list_of_names_belongs_is_not_read_letter_by_letter(
    field: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=f"wrong kind: {field} is no list of names"):
        path_of(SimpleNamespace(**fields), "model here")


def test_modules_are_not_made_from_the_configuration_of_others(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_fallback_twin(folder, "Olmo2ForCausalLM")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("Olmo2ForCausalLM", "OlmoForCausalLM"))
    with pytest.raises(
        ConfigError, match="architecture OlmoForCausalLM: its model_type is 'olmo2'"
    ):
        open_model(folder, name="tiny", page_size=16, cache=tmp_path, deterministic=False)
