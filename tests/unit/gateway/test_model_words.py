"""Where a model's folder says its words: template, special tokens, end tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.gateway.support import END, byte_tokenizer

from pagemesh.gateway.words.templates import TemplateRefused
from pagemesh.gateway.words.tokens import Tokens
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.work_messages import ENDS_MAX

CONFIG, TEMPLATES, MAP = "tokenizer_config.json", "chat_template.json", "special_tokens_map.json"
GENERATION, MODEL = "generation_config.json", "config.json"


def folder_of(folder: Path, files: dict[str, Any]) -> Path:
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    return folder


def rendered(folder: Path) -> str:
    return Tokens.load(folder).render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": "HERE", CONFIG: {"chat_template": "there"}},
        {CONFIG: {"chat_template": "HERE"}, TEMPLATES: {"chat_template": "there"}},
        {CONFIG: {}, TEMPLATES: {"chat_template": "HERE"}},
        {
            CONFIG: {
                "chat_template": [
                    {"name": "tool_use", "template": "there"},
                    {"name": "default", "template": "HERE"},
                ]
            }
        },
    ],
)
def test_a_template_is_found_wherever_models_have_it(tmp_path: Path, files: dict[str, Any]) -> None:
    assert rendered(folder_of(tmp_path, files)) == "HERE"


@pytest.mark.parametrize("in_folder", [False, True])
def test_chats_with_tools_may_have_a_template_of_their_own(tmp_path: Path, in_folder: bool) -> None:
    other = "{{ tools | length }} tools"
    if in_folder:
        (tmp_path / "additional_chat_templates").mkdir()
        files: dict[str, Any] = {
            "chat_template.jinja": "HERE", "additional_chat_templates/tool_use.jinja": other
        }  # fmt: skip
    else:
        named = {"default": "HERE", "tool_use": other}
        templates = [{"name": name, "template": text} for name, text in named.items()]
        files = {CONFIG: {"chat_template": templates}}
    tokens = Tokens.load(folder_of(tmp_path, files))
    messages = [{"role": "user", "content": "x"}]
    assert tokens.render_chat(messages) == "HERE" == tokens.render_chat(messages, extra={"a": 1})
    assert tokens.render_chat(messages, extra={"tools": [{}, {}]}) == "2 tools"
    assert (tokens.facts["chat_template"], tokens.tool_source) == ("HERE", other)


def test_a_broken_template_for_tools_stops_nobody_else(tmp_path: Path) -> None:
    named = {"default": "HERE", "tool_use": "{% for"}
    templates = [{"name": name, "template": text} for name, text in named.items()]
    tokens = Tokens.load(folder_of(tmp_path, {CONFIG: {"chat_template": templates}}))
    messages = [{"role": "user", "content": "x"}]
    assert tokens.render_chat(messages) == "HERE" == tokens.tool_source


def test_a_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {})
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja cannot be read"):
        Tokens.load(folder)


def test_of_templates_by_name_none_stands_for_the_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "there"}, "default", {"name": ["default"]}]
    with pytest.raises(TemplateRefused, match="no chat template"):
        rendered(folder_of(tmp_path, {CONFIG: {"chat_template": named}}))


def test_a_template_knows_special_tokens_by_the_words_of_the_first_file_that_has_them(
    tmp_path: Path,
) -> None:
    files = {
        "chat_template.jinja": "{{ bos_token }}{{ eos_token }}{{ pad_token }}",
        CONFIG: {"bos_token": {"content": "<s>"}, "pad_token": None},
        MAP: {"bos_token": "other", "eos_token": "</s>", "pad_token": "<pad>"},
    }
    assert rendered(folder_of(tmp_path, files)) == "<s></s><pad>"


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, set()),
        ({MODEL: {"eos_token_id": 3}}, {3}),
        ({GENERATION: {"eos_token_id": [3, 5]}, MODEL: {"eos_token_id": 7}}, {3, 5, 7}),
        ({CONFIG: {"eos_token": END}}, {260}),
        ({CONFIG: {"eos_token": "nowhere"}, MODEL: {"eos_token_id": -1}}, set()),
        ({GENERATION: {"eos_token_id": [1 << 32, 3]}, MODEL: {"eos_token_id": True}}, {3}),
        ({MAP: {"eos_token": {"content": END}}, MODEL: {"eos_token_id": None}}, {260}),
    ],
)
def test_whatever_a_file_calls_an_end_ends_a_choice(
    tmp_path: Path, files: dict[str, Any], ends: set[int]
) -> None:
    assert Tokens.load(folder_of(tmp_path, files)).end_tokens == ends


def test_a_prompt_is_neither_cut_nor_filled_up_whatever_its_tokenizer_was_made_for(
    tmp_path: Path,
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokens.load(tmp_path)
    for count in (2, 20):
        assert len(loaded.encode("x" * count, add_special_tokens=False)) == count


def test_more_end_tokens_than_a_worker_looks_for_are_refused(tmp_path: Path) -> None:
    ids = list(range(ENDS_MAX))
    folder = folder_of(tmp_path, {GENERATION: {"eos_token_id": ids}})
    assert len(Tokens.load(folder).end_tokens) == ENDS_MAX
    folder = folder_of(tmp_path, {GENERATION: {"eos_token_id": [*ids, ENDS_MAX]}})
    with pytest.raises(ConfigError, match="65 end tokens; the limit is 64"):
        Tokens.load(folder)
