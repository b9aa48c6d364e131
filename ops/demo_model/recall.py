"""Recall documents: `key: value` lines, other text, then questions that only the lines answer.

A model can only answer by looking back at the line itself, so a wrong page of its KV cache becomes
a wrong answer. Keys and values are random in each document: nothing can be learnt by heart.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ops.demo_model import dialogues, stories, words
from ops.demo_model.pieces import (
    END_OF_TEXT,
    FOCUS,
    HINT,
    IM_END,
    IM_START,
    NOISE,
    Document,
    Piece,
    count_tokens,
    pick,
    text_of,
    turn,
)

HEADERS = (
    "Remember these values:",
    "Here is a list of values.",
    "Please remember this list:",
    "Keep these values in mind:",
    "These are the values:",
)
PROMISES = (
    "I will remember them.",
    "I will remember these values.",
    "Okay.",
    "I have read the list.",
)
QUESTIONS = (
    "What is the value of {key}?",
    "What is the value of {key}?",
    "What is {key}?",
    "Which value does {key} have?",
    "Tell me the value of {key}.",
    "Value of {key}?",
    "{key}?",
    "And {key}?",
)
IN_A_SENTENCE = "What is the value of {key}? Answer in a sentence."
SEPARATORS = (": ", ": ", ": ", " = ", " ")
BULLETS = ("", "", "- ")
SETUP_TOKENS = 60  # chat marks, header and the assistant's confirmation around a list
LINE_TOKENS = 6
LINES_MAX = 40  # per list; longer documents are filled with other talk and more questions


@dataclass(frozen=True, slots=True)
class Style:
    """How one document writes its lines."""

    separator: str
    bullet: str

    def line(self, key: str, value: str) -> str:
        """The line as the list shows it."""
        return f"{self.bullet}{key}{self.separator}{value}"

    def answer(self, key: str, value: str) -> str:
        """The line as an answer repeats it."""
        return f"{key}{self.separator}{value}"


@dataclass(frozen=True, slots=True)
class Probe:
    """One question: `prompt` holds the line that is asked for, and ends where the answer begins.

    `gap_tokens` counts from the end of that line to the end of the prompt, by `count_tokens`.
    """

    prompt: str
    answer: str
    line: str
    gap_tokens: int


def random_key(rng: random.Random) -> str:
    """Mostly a common noun; sometimes an invented word or a noun with a number."""
    kind = rng.random()
    if kind < 0.86:
        return pick(rng, words.KEYS)
    if kind < 0.94:
        return "".join(pick(rng, words.SYLLABLES) for _ in range(rng.randint(2, 3)))
    return f"{pick(rng, words.KEYS)} {rng.randint(1, 99)}"


def random_value(rng: random.Random, kind: str) -> str:
    """A value of a list's kind: "digits" (four of them), "words" or "mixed"."""
    digits = kind == "digits" or (kind == "mixed" and rng.random() < 0.5)
    return f"{rng.randint(1000, 9999)}" if digits else pick(rng, words.VALUE_WORDS)


def entries(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """`count` pairs with different keys."""
    kind = pick(rng, ("digits", "digits", "words", "mixed"))
    pairs: dict[str, str] = {}
    while len(pairs) < count:
        pairs[random_key(rng)] = random_value(rng, kind)
    return list(pairs.items())


def _style(rng: random.Random) -> Style:
    return Style(separator=pick(rng, SEPARATORS), bullet=pick(rng, BULLETS))


def _lines(style: Style, pairs: list[tuple[str, str]]) -> list[Piece]:
    """The list itself. The random values cannot be predicted, so they have no weight."""
    pieces: list[Piece] = []
    for key, value in pairs:
        shown = style.line(key, "")
        pieces += [Piece(shown.rstrip(" "), HINT), Piece(f" {value}", NOISE), Piece("\n", HINT)]
    return pieces


def _filler_turns(rng: random.Random, tokens: int) -> list[Piece]:
    """Chat turns about other things, of about `tokens` tokens in all."""
    pieces: list[Piece] = []
    used = 0
    while used < tokens:
        small = tokens - used < 90 or rng.random() < 0.3
        said, reply = (dialogues.small_exchange if small else dialogues.story_exchange)(rng)
        pieces += [*turn("user", said), *turn("assistant", reply)]
        used += count_tokens(said) + count_tokens(reply) + 12
    return pieces


def _exchange(rng: random.Random, style: Style, key: str, value: str) -> tuple[str, str]:
    """A question for a key and its answer."""
    if rng.random() < 0.12:
        return IN_A_SENTENCE.format(key=key), f"The value of {key} is {value}."
    return pick(rng, QUESTIONS).format(key=key), style.answer(key, value)


def _reply(reply: str, value: str) -> list[Piece]:
    """The assistant's turn; the value in it has the highest weight."""
    before, _, after = reply.rpartition(f" {value}")
    return [
        Piece(f"{IM_START}assistant\n", HINT),
        Piece(before),
        Piece(f" {value}", FOCUS),
        Piece(f"{after}{IM_END}"),
        Piece("\n", HINT),
    ]


def _question(rng: random.Random, style: Style, key: str, value: str) -> list[Piece]:
    """One exchange that asks for a key, as turns."""
    asked, reply = _exchange(rng, style, key, value)
    return [*turn("user", asked), *_reply(reply, value)]


def _list_turns(rng: random.Random, lines: list[Piece]) -> list[Piece]:
    """The list as a system message, or as a user message that the assistant confirms."""
    as_system = rng.random() < 0.4
    head = Piece(f"{IM_START}{'system' if as_system else 'user'}\n{_header(rng)}", HINT)
    body = [*lines[:-1], Piece(f"{IM_END}\n", HINT)]
    return [head, *body, *([] if as_system else turn("assistant", pick(rng, PROMISES)))]


def _list_with_question(
    rng: random.Random, style: Style, pairs: list[tuple[str, str]]
) -> list[Piece]:
    """The list and a first question in one user message, and the answer."""
    key, value = pairs[rng.randrange(len(pairs))]
    asked, reply = _exchange(rng, style, key, value)
    head = Piece(f"{IM_START}user\n{_header(rng)}", HINT)
    tail = Piece(f"{asked}{IM_END}\n", HINT)
    return [head, *_lines(style, pairs), tail, *_reply(reply, value)]


def _header(rng: random.Random) -> str:
    return f"{pick(rng, HEADERS)}\n" if rng.random() < 0.7 else ""


def _count(rng: random.Random, tokens: int) -> int:
    """How many lines a document of this size lists: rather few, at most about a third of its
    tokens."""
    most = max(3, min(LINES_MAX, tokens // 3 // LINE_TOKENS))
    return rng.randint(2, rng.randint(3, most))


def chat_document(rng: random.Random, tokens: int) -> Document:
    """A chat of about `tokens` tokens: a list, other talk, and many questions about the list."""
    style = _style(rng)
    pairs = entries(rng, _count(rng, tokens))
    if rng.random() < 0.4:
        pieces = _list_with_question(rng, style, pairs)
    else:
        pieces = _list_turns(rng, _lines(style, pairs))
    used = SETUP_TOKENS + len(pairs) * LINE_TOKENS
    pieces += _filler_turns(rng, int((tokens - used) * rng.random() * 0.6)) if tokens > 200 else []
    pieces += _ask_until(rng, style, pairs, tokens - count_tokens(text_of(tuple(pieces))))
    return (*pieces, Piece(END_OF_TEXT))


def _ask_until(
    rng: random.Random, style: Style, pairs: list[tuple[str, str]], tokens: int
) -> list[Piece]:
    """Questions in random order, now and then with other talk between, to about `tokens` tokens."""
    pieces: list[Piece] = []
    order: list[tuple[str, str]] = []
    while tokens > 0:
        order = order or rng.sample(pairs, len(pairs))
        asked = _question(rng, style, *order.pop())
        if rng.random() < 0.06:
            asked = _filler_turns(rng, 20)
        pieces += asked
        tokens -= count_tokens(text_of(tuple(asked)))
    return pieces


def line_document(rng: random.Random, tokens: int) -> Document:
    """Plain text of about `tokens` tokens: lines, sometimes stories, then the lines once more."""
    style = _style(rng)
    pairs = entries(rng, _count(rng, tokens))
    pieces = _lines(style, pairs)
    left = tokens - LINE_TOKENS * len(pairs)
    filler = int(left * rng.random() * 0.5) if tokens > 200 else 0
    while filler > 100:
        text = f"\n{stories.story(rng)}\n"
        pieces.append(Piece(text))
        filler -= count_tokens(text)
    pieces.append(Piece("\n", HINT))
    left = tokens - count_tokens(text_of(tuple(pieces)))
    order: list[tuple[str, str]] = []
    for _ in range(max(1, left // LINE_TOKENS)):
        order = order or rng.sample(pairs, len(pairs))
        key, value = order.pop()
        asked = style.answer(key, "").rstrip(" ")
        pieces += [Piece(asked, HINT), Piece(f" {value}", FOCUS), Piece("\n", HINT)]
    return (*pieces, Piece(END_OF_TEXT))


def copy_document(rng: random.Random, tokens: int) -> Document:
    """Rows of random words, each given once and then repeated, up to about `tokens` tokens.

    This is the simplest form of recall: the model learns it early, and the others build on it.
    """
    pieces: list[Piece] = []
    while tokens > 0:
        row = rng.choices(words.KEYS, k=rng.randint(4, max(5, min(60, tokens // 4))))
        text = " " + " ".join(row)
        if rng.random() < 0.5:
            pieces += [Piece(f"{text[1:]}\n", NOISE), Piece(f"{text[1:]}\n" * rng.randint(1, 2))]
        else:
            asked = Piece(f"{IM_START}user\nRepeat:{text}{IM_END}\n", NOISE)
            pieces += [asked, *turn("assistant", text[1:])]
        tokens -= count_tokens(text) * 2
    return (*pieces, Piece(END_OF_TEXT))


def recall_document(rng: random.Random, tokens: int) -> Document:
    """A recall document of about `tokens` tokens in one of three forms."""
    kind = rng.random()
    if kind < 0.12:
        return copy_document(rng, tokens)
    return (line_document if kind < 0.5 else chat_document)(rng, tokens)


def probe(rng: random.Random, gap_tokens: int, line_count: int = 16) -> Probe:
    """A chat whose last question asks for a line at least `gap_tokens` back, and not much further.

    The list has `line_count` lines; other talk fills the distance.
    """
    style = Style(separator=": ", bullet="")
    pairs = entries(rng, line_count)
    key, value = pairs[rng.randrange(line_count)]
    listed = tuple(_list_turns(rng, _lines(style, pairs)))
    asked = (*turn("user", f"What is the value of {key}?"), Piece(f"{IM_START}assistant\n"))
    line = style.line(key, value)
    head = text_of(listed)
    after = head[
        head.index(f"\n{line}\n" if f"\n{line}\n" in head else f"\n{line}") + 1 + len(line) :
    ]
    missing = gap_tokens - count_tokens(after) - count_tokens(text_of(asked))
    filler: list[Piece] = []
    while missing > 0:
        added = _filler_turns(rng, min(missing, 60))
        filler += added
        missing -= count_tokens(text_of(tuple(added)))
    prompt = head + text_of(tuple(filler)) + text_of(asked)
    back = count_tokens(after) + count_tokens(text_of((*filler, *asked)))
    return Probe(prompt=prompt, answer=style.answer(key, value), line=line, gap_tokens=back)
