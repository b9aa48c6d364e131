"""What is wrong with a body is told by its place in it."""

from __future__ import annotations

import pytest
from tests.unit.gateway.test_openai_api import chat, completion

from pagemesh.gateway.api.api_errors import ApiError
from pagemesh.gateway.api.decoding import decode
from pagemesh.gateway.api.openai_types import NOT_YET, ChatBody, CompletionBody


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"model":"tiny","prompt":"\xff"}', "not UTF-8: invalid start byte (byte 26)"),
        (b'{"model":"tiny","prompt":"\xc3"}', "not UTF-8: invalid continuation byte (byte 26)"),
        (b'{"model":"tiny",,}', "not valid JSON"),
    ],
)
def test_bytes_that_are_no_text_and_text_that_is_no_json(body: bytes, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode(body, CompletionBody)
    assert caught.value.code == "invalid_json"
    assert message in caught.value.message


def test_what_is_null_need_not_be_known() -> None:
    body = b"""{"messages": [{"role": "user", "content": "hi", "cache_control": null}],
        "guided_json": null, "seed": 3, "chat_template_kwargs": {"mood": null}}"""
    chat = decode(body, ChatBody)
    assert (chat.messages[0].content, chat.seed) == ("hi", 3)
    assert chat.chat_template_kwargs == {"mood": None}, "null is a value to a template"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        (b'"odd": 1, "even": null', "odd", "unknown_parameter"),
        (b'"odd": null, "seed": "x"', "seed", "invalid_value"),
        (b'"odd": null, "logit_bias": {"5": null}', "logit_bias", "invalid_value"),
        (b'"odd": null, "user": ' + b"[" * 2_000 + b"]" * 2_000, "", "invalid_json"),
    ],
)
def test_beside_nulls_what_is_wrong_is_named(fields: bytes, param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode(b'{"prompt": "x", ' + fields + b"}", CompletionBody)
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize("name", NOT_YET)
def test_what_other_servers_take_is_said_to_be_missing_unless_it_is_null(name: str) -> None:
    for ask in (chat, completion):
        assert ask(**{name: None}) == ask()
        with pytest.raises(ApiError) as caught:
            ask(**{name: {}})
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
