"""The model's words, read without any model code."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.unit.gateway.support import END, TEMPLATE, byte_tokenizer
from tokenizers import AddedToken

from pagemesh.gateway.api.scores import Written
from pagemesh.gateway.words.templates import ChatTemplate, TemplateRefused
from pagemesh.gateway.words.tokens import Tokens
from pagemesh.wire.errors import ConfigError

TRIMMING = TEMPLATE.replace("message['content']", "message['content'] | trim")


@pytest.fixture
def tokens(model_folder: Path) -> Tokens:
    return Tokens.load(model_folder)


def test_the_gateway_loads_neither_torch_nor_transformers(model_folder: Path) -> None:
    script = (
        "import pathlib, sys\n"
        "import pagemesh.gateway.service\n"
        "from pagemesh.gateway.words.tokens import Tokens\n"
        f"Tokens.load(pathlib.Path({str(model_folder)!r})).encode('x', add_special_tokens=True)\n"
        "print([name for name in ('torch', 'transformers', 'triton') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_chat_becomes_the_prompt_of_its_template(tokens: Tokens) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well "}]
    assert tokens.render_chat(messages) == f"[user]hi{END}[assistant]well {END}[assistant]"


@pytest.mark.parametrize("source", [TEMPLATE, TRIMMING], ids=["as it is", "trimmed"])
@pytest.mark.parametrize("last", ["well", "well ", " well\n", "", "e", "end", "|", END, "hi"])
def test_a_final_message_is_left_open_as_transformers_leaves_it(source: str, last: str) -> None:
    tokens = Tokens(byte_tokenizer(), template=ChatTemplate(source, {}), end_tokens=frozenset())
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": last}]
    given = [dict(message) for message in messages]
    open_end = tokens.render_chat(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert messages == given, "what is asked for stays as it is"
    if source == TEMPLATE:
        assert open_end == f"[user]hi{END}[assistant]{last}"
    [theirs], _ = render_jinja_template(
        [messages], chat_template=source, continue_final_message=True
    )
    assert open_end == theirs


def test_a_final_message_that_the_template_does_not_show_cannot_go_on(tokens: Tokens) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    last = "messages[-1].content"
    for source in (
        "{{ messages[0].content }}", f"{{{{ {last} | lower }}}}", f"{{{{ {last}[2:] }}}}", "Well",
    ):  # fmt: skip
        shy = Tokens(byte_tokenizer(), template=ChatTemplate(source, {}), end_tokens=frozenset())
        with pytest.raises(TemplateRefused, match="final message"):
            shy.render_chat(messages, add_generation_prompt=False, continue_final_message=True)


def test_text_and_tokens_go_both_ways(tokens: Tokens) -> None:
    ids = tokens.encode("the h\u00e9llo\n", add_special_tokens=False)
    assert tokens.decode(ids.tolist()) == "the h\u00e9llo\n"
    whole = b"".join(tokens.token_bytes(token) for token in ids.tolist())
    assert tokens.byte_count(ids.tolist()) == len(whole)
    assert whole.decode() == "the h\u00e9llo\n"
    assert tokens.written(ids.tolist()[0]) == Written.of(b"the")


def test_a_long_text_is_tokenised_as_its_parts_are(tokens: Tokens) -> None:
    line = "the h\u00e9llo " + "x" * 100 + "\n"
    short = tokens.encode(line, add_special_tokens=False)
    long = tokens.encode(line * 100, add_special_tokens=False)
    assert long.tolist() == short.tolist() * 100


def test_other_threads_run_while_a_text_of_megabytes_is_tokenised(tokens: Tokens) -> None:
    text = "a" * 2_000_000
    done = threading.Event()

    def work() -> None:
        tokens.encode(text, add_special_tokens=False)
        done.set()

    thread, turns = threading.Thread(target=work), 0
    thread.start()
    while not done.is_set():
        time.sleep(0.005)
        turns += 1
    thread.join()
    assert turns > 10


def test_a_tokenizer_that_panics_raises_what_is_caught_and_answered() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<|a", rstrip=True), AddedToken(" ", lstrip=True)])
    tokens = Tokens(tokenizer, template=None, end_tokens=frozenset())
    with pytest.raises(RuntimeError, match="the tokenizer failed"):
        tokens.encode("<|a  x", add_special_tokens=False)
    assert len(tokens.encode("x", add_special_tokens=False)) == 1


def test_every_end_token_that_a_file_names_ends_a_choice(tokens: Tokens, tmp_path: Path) -> None:
    assert [tokens.decode([token]) for token in tokens.end_tokens] == [END]
    folder = tmp_path / "two"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(_tokenizer_json(tokens))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert Tokens.load(folder).end_tokens == {3, 5}


def test_a_model_without_template_refuses_chats_only(tokens: Tokens, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(_tokenizer_json(tokens))
    bare = Tokens.load(tmp_path)
    with pytest.raises(TemplateRefused, match="no chat template"):
        bare.render_chat([{"role": "user", "content": "x"}])
    assert len(bare.encode("x", add_special_tokens=True)) == 1


def test_a_folder_that_lacks_something_is_named(tmp_path: Path, tokens: Tokens) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokens.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokens.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(_tokenizer_json(tokens))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="no JSON object"):
        Tokens.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}')
    with pytest.raises(ConfigError, match="does not parse"):
        Tokens.load(tmp_path)


def _tokenizer_json(tokens: Tokens) -> str:
    text: str = tokens._tokenizer.to_str()
    return text


def test_a_token_is_called_what_the_text_shows_of_it() -> None:
    mark = "<\uff5cend\u2581of\u2581sentence\uff5c>"
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([mark])
    tokens = Tokens(tokenizer, template=None, end_tokens=frozenset())
    number = tokenizer.token_to_id(mark)
    assert number is not None
    assert tokens.token_bytes(number).decode() == tokens.decode([number]) == mark
