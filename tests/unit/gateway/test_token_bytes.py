"""A text is refused unread only when no tokenisation of it can be short enough."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gateway.fake_mesh import FakeMesh
from tests.unit.gateway.support import MODEL, eventually
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.normalizers import Normalizer

from pagemesh.gateway.words.token_bytes import bytes_per_token_max
from pagemesh.gateway.words.tokens import BYTE_LETTERS

KELVIN, IOTA_WITH_MARKS = "\u212a", "\u1fbe\u0308\u0301"
SOME = st.text("ab \u2581\u00e9\u20ac" + KELVIN + IOTA_WITH_MARKS, max_size=60)


def byte_level(normalizer: Normalizer | None = None) -> Tokenizer:
    """All bytes, and tokens of up to eight letters or blanks."""
    vocab = {letter: index for index, letter in enumerate(sorted(BYTE_LETTERS))}
    merges = []
    for letter in ("a", "\u0120"):
        for width in (1, 2, 4):
            merges.append((letter * width, letter * width))
            vocab[letter * 2 * width] = len(vocab)
    made = Tokenizer(BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def byte_fallback() -> Tokenizer:
    """As SentencePiece does it: a visible blank, and a token for each byte of what is new."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    blank = "\u2581"
    for text in ("a", "b", blank, blank * 2, blank * 4):
        vocab[text] = len(vocab)
    merges = [(blank, blank), (blank * 2, blank * 2)]
    made = Tokenizer(BPE(vocab, merges, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", blank)
    return made


BOUNDED = {
    "byte level": byte_level(),
    "composed": byte_level(normalizers.NFC()),
    "byte fallback": byte_fallback(),
}


@pytest.mark.parametrize("kind", BOUNDED)
@given(text=SOME)
def test_no_text_has_fewer_tokens_than_its_bytes_ask_for(kind: str, text: str) -> None:
    tokenizer = BOUNDED[kind]
    most = bytes_per_token_max(tokenizer, BYTE_LETTERS)
    assert most is not None
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) * most >= len(text.encode())


def test_the_bound_is_the_longest_token() -> None:
    assert bytes_per_token_max(byte_level(), BYTE_LETTERS) == 8
    assert bytes_per_token_max(byte_fallback(), BYTE_LETTERS) == 4 * len("\u2581".encode())


@pytest.mark.parametrize("normalizer", [normalizers.Strip(), normalizers.Replace(Regex(" +"), " ")])
def test_there_is_no_bound_where_text_is_dropped(normalizer: Normalizer) -> None:
    assert bytes_per_token_max(byte_level(normalizer), BYTE_LETTERS) is None
    dropping = byte_level()
    dropping.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    assert bytes_per_token_max(dropping, BYTE_LETTERS) is None


def test_there_is_no_bound_where_a_token_takes_any_amount_of_text() -> None:
    greedy = byte_level()
    greedy.add_special_tokens([AddedToken("<end>", rstrip=True)])
    unknown = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    fewer = Tokenizer(BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True))
    for tokenizer in (greedy, unknown, fewer):
        assert bytes_per_token_max(tokenizer, BYTE_LETTERS) is None


async def test_megabytes_that_cannot_fit_are_refused_unread(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    await eventually(lambda: mesh.front.gateway.known_facts is not None)
    read: list[str] = []
    monkeypatch.setattr(mesh.front.tokens, "encode", lambda text, **_: read.append(text))
    text = "some words of text " * 200_000
    async with httpx.AsyncClient(base_url=mesh.url, timeout=30) as http:
        for path, body in (
            ("/v1/completions", {"prompt": text}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ):
            refused = await http.post(path, json={"model": MODEL, "max_tokens": 1} | body)
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "maximum context length is 3200 tokens" in error["message"]
            assert "has at least" in error["message"]
    assert read == []


async def test_an_answer_that_cannot_fit_is_told_the_limit_and_the_prompts_own_length(
    mesh: FakeMesh,
) -> None:
    await eventually(lambda: mesh.front.gateway.known_facts is not None)
    async with httpx.AsyncClient(base_url=mesh.url, timeout=30) as http:
        body = {"model": MODEL, "prompt": "abcdefgh" * 4, "max_tokens": 1_000_000}
        refused = await http.post("/v1/completions", json=body)
        tokens = len(
            (await http.post("/tokenize", json={"prompt": body["prompt"]})).json()["tokens"]
        )
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    told = f"has {tokens}, so that max_tokens may be {3_200 - tokens} at most, not 1000000"
    assert told in error["message"] and "maximum context length is 3200 tokens" in error["message"]
