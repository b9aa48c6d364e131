"""A talk's next turn tokenises its new text alone, and has the tokens of the whole."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.gateway.fake_mesh import FakeMesh
from tests.unit.gateway.support import END, MODEL, byte_tokenizer, eventually
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece

from pagemesh.gateway.words.token_memory import PIECE_COUNT_MAX, TokenMemory, cuts_of
from pagemesh.gateway.words.tokens import Tokens
from pagemesh.runtime.model_folder import find_model, tokenizer_file

BLANK = "\u2581"
OWNER = b"somebody"
SPECIAL = ("<|a|>", "<|a|>b", "<|ab", "<r>", "<l>", " <b>", "b<|", "b", "<n>", "\u2581\u2581")
WORDS = (
    *SPECIAL,
    "<|a|",
    "<|end|>",
    " ",
    "  ",
    "\n",
    "a",
    "ab",
    "the",
    "Bb ",
    "\u00e9",
    "e\u0301",
    "7",
)
TEXTS = st.lists(st.sampled_from(WORDS), max_size=24).map("".join)


def with_added(made: Tokenizer) -> Tokenizer:
    """All sorts of added tokens, some the beginning of others."""
    made.add_special_tokens([
        AddedToken("<|a|>"), AddedToken("<|a|>b"), AddedToken("<|ab"), AddedToken(" <b>"),
        AddedToken("b<|"),
        AddedToken("<r>", rstrip=True), AddedToken("<l>", lstrip=True), AddedToken(END),
    ])  # fmt: skip
    made.add_tokens([
        AddedToken("<n>", normalized=True, lstrip=True, rstrip=True, single_word=True),
        AddedToken("\u2581\u2581", normalized=False), AddedToken("the", normalized=True),
    ])  # fmt: skip
    return made


def pieces_of_words(**options: bool) -> BPE:
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    for text in ("a", "b", "t", BLANK, BLANK + "a", BLANK + "ab", "ab", "b" + BLANK, BLANK * 2):
        vocab[text] = len(vocab)
    merges = [(BLANK, "a"), ("a", "b"), (BLANK, "ab"), ("b", BLANK), (BLANK, BLANK)]
    return BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, **options)


def metaspace(scheme: str) -> Tokenizer:
    made = Tokenizer(pieces_of_words(byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return made


def prepended() -> Tokenizer:
    made = Tokenizer(pieces_of_words())
    steps = [normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)]
    made.normalizer = normalizers.Sequence(steps)
    return made


def byte_level(*, prefix: bool) -> Tokenizer:
    made = byte_tokenizer()
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.Split(Regex(r"\s+(?!\S)|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
    ])  # fmt: skip
    return made


def unigram() -> Tokenizer:
    scores = [("<unk>", 0.0), (BLANK, -2.0), ("a", -2.5), ("b", -2.5), ("ab", -3.0)]
    made = Tokenizer(Unigram([*scores, (BLANK + "a", -3.5), ("the", -4.0)], 0, False))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return made


def word_piece() -> Tokenizer:
    vocab = {"[UNK]": 0, "a": 1, "b": 2, "##b": 3, "the": 4, "e": 5, "7": 6}
    made = Tokenizer(WordPiece(vocab, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


def word_level() -> Tokenizer:
    made = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "the": 2}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def demo() -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_file(find_model("").path)))


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_tokenizer,
    "byte level, composed and split": lambda: byte_level(prefix=False),
    "byte level with a blank before": lambda: byte_level(prefix=True),
    "metaspace always": lambda: metaspace("always"),
    "metaspace first": lambda: metaspace("first"),
    "metaspace never": lambda: metaspace("never"),
    "blank before by normalizer": prepended,
    "unigram": unigram,
    "word piece": word_piece,
    "word level": word_level,
    "demo model": demo,
}
MADE = {name: with_added(make()) for name, make in KINDS.items()}
REMEMBERING = {
    name: Tokens(tokenizer, template=None, end_tokens=frozenset())
    for name, tokenizer in MADE.items()
}


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
@settings(max_examples=200)
def test_the_tokens_of_pieces_are_those_of_the_whole(kind: str, text: str) -> None:
    tokens = REMEMBERING[kind]
    whole = tokens.encode(text, add_special_tokens=False).tolist()
    assert tokens.encode(text, add_special_tokens=False, owner=OWNER).tolist() == whole
    assert tokens.encode(text, add_special_tokens=False, owner=OWNER).tolist() == whole
    tokens._memory.check()


@given(text=TEXTS)
def test_a_text_is_cut_where_the_tokenizer_cuts_it_first(text: str) -> None:
    cuts = cuts_of(MADE["byte level"])
    assert cuts is not None
    pieces = cuts.pieces(text)
    assert "".join(pieces) == text
    assert all(
        piece.startswith(("<|a|>", "<|ab", "b<|", "<r>", END, BLANK * 2)) for piece in pieces[1:]
    )


class Counted:
    """Counts what a tokenizer is given."""

    def __init__(self, tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[str] = []
        self.call_count = 0
        encode = tokens._encode

        def counting(texts: list[str], *, add_special_tokens: bool) -> object:
            self.read += texts
            self.call_count += 1
            return encode(texts, add_special_tokens=add_special_tokens)

        monkeypatch.setattr(tokens, "_encode", counting)


def test_new_pieces_are_tokenised_together_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens(byte_tokenizer(), template=None, end_tokens=frozenset())
    counted = Counted(tokens, monkeypatch)
    text = f"one{END}two{END}one{END}two"
    ids = tokens.encode(text, add_special_tokens=False, owner=OWNER).tolist()
    assert counted.call_count == 1 and counted.read == ["one", f"{END}two", f"{END}one"]
    assert ids == tokens.encode(text, add_special_tokens=False).tolist()


def test_only_what_is_new_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens(byte_tokenizer(), template=None, end_tokens=frozenset())
    counted = Counted(tokens, monkeypatch)
    tokens.encode(f"one{END}two{END}", add_special_tokens=False, owner=OWNER)
    assert counted.read == ["one", f"{END}two", END]
    counted.read.clear()
    tokens.encode(f"one{END}two{END}three{END}", add_special_tokens=False, owner=OWNER)
    assert counted.read == [f"{END}three"]


def test_what_one_owner_sent_is_not_known_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens(byte_tokenizer(), template=None, end_tokens=frozenset())
    counted = Counted(tokens, monkeypatch)
    for owner in (b"one", b"another"):
        tokens.encode(f"text{END}", add_special_tokens=False, owner=owner)
    assert counted.read == ["text", END] * 2


@pytest.mark.parametrize("shorter", [0, 1])
def test_a_piece_that_is_just_as_long_as_may_be_is_remembered_ahead(
    monkeypatch: pytest.MonkeyPatch, shorter: int
) -> None:
    tokens = Tokens(byte_tokenizer(), template=None, end_tokens=frozenset())
    piece = f"{END}hello"
    tokens.remember(f"one{piece}", owner=OWNER, characters_max=len(piece) - shorter)
    counted = Counted(tokens, monkeypatch)
    tokens.encode(f"one{piece}", add_special_tokens=False, owner=OWNER)
    assert counted.read == [piece] * shorter


def test_a_text_that_gets_tokens_around_it_is_tokenised_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = byte_tokenizer()
    end = tokenizer.token_to_id(END)
    tokenizer.post_processor = processors.TemplateProcessing(f"{END} $A", None, [(END, end)])
    tokens = Tokens(tokenizer, template=None, end_tokens=frozenset())
    counted = Counted(tokens, monkeypatch)
    text = f"the{END}hand"
    ids = tokens.encode(text, add_special_tokens=True, owner=OWNER).tolist()
    assert counted.read == [text]
    assert ids == [end, *tokens.encode(text, add_special_tokens=False, owner=OWNER).tolist()]


def test_a_text_of_very_many_pieces_is_tokenised_whole() -> None:
    cuts = cuts_of(byte_tokenizer())
    assert cuts is not None
    assert len(cuts.pieces(END * PIECE_COUNT_MAX)) == PIECE_COUNT_MAX
    assert len(cuts.pieces(END * (PIECE_COUNT_MAX + 1))) == 1


def random_pieces() -> Tokenizer:
    made = byte_tokenizer()
    made.model.dropout = 0.5
    return made


def own_words_only() -> Tokenizer:
    made = byte_tokenizer()
    made.add_special_tokens([AddedToken("<w>", single_word=True)])
    return made


def unknown_step() -> Tokenizer:
    made = byte_tokenizer()
    made.pre_tokenizer = pre_tokenizers.CharDelimiterSplit("x")
    return made


def nothing_to_cut_at() -> Tokenizer:
    return Tokenizer(pieces_of_words())


@pytest.mark.parametrize("make", [random_pieces, own_words_only, unknown_step, nothing_to_cut_at])
def test_a_tokenizer_that_is_not_known_to_work_in_pieces_gets_none(
    make: Callable[[], Tokenizer],
) -> None:
    assert cuts_of(make()) is None


def test_the_memory_forgets_what_was_not_used_for_longest() -> None:
    memory = TokenMemory(bytes_max=100_000)
    for index in range(1_000):
        memory.keep(OWNER, f"piece {index}", bytes(400))
        assert memory.find(OWNER, "piece 0") is not None
        memory.check()
    assert memory.find(OWNER, "piece 999") is not None
    assert memory.find(OWNER, "piece 1") is None
    memory.keep(OWNER, "large", bytes(20_000))
    assert memory.find(OWNER, "large") is None
    memory.check()


async def test_the_next_turn_of_a_talk_is_tokenised_from_where_it_is_new(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    await eventually(lambda: mesh.front.gateway.known_facts is not None)
    counted = Counted(mesh.front.tokens, monkeypatch)
    talk = [{"role": "user", "content": "the first"}]
    async with httpx.AsyncClient(base_url=mesh.url, timeout=30) as http:
        for _ in range(2):
            body = {"model": MODEL, "messages": talk, "max_tokens": 1}
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            talk = [*talk, {"role": "assistant", "content": "well"}]
            talk.append({"role": "user", "content": "the next"})
    asked = [
        "[user]the first", f"{END}[assistant]", f"{END}[assistant]well", f"{END}[user]the next",
    ]  # fmt: skip
    # What was answered, which this client changes, is read too: see ``test_next_turn``.
    assert [piece for piece in counted.read if piece in asked] == asked
