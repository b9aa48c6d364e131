"""What is wrong with a body is told by its place in it."""

from __future__ import annotations

import pytest

from pagemesh.gateway.api.api_errors import ApiError
from pagemesh.gateway.api.decoding import decode
from pagemesh.gateway.api.openai_types import CompletionBody


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
