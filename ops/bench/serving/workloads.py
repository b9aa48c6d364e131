"""The workloads for a server: five of them, generated from a seed. Pure.

Each token of a prompt is a space and a word, so that the prompt has the same length as token ids
and as text, and every server sees the same tokens, whichever form it takes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

_WORDS_MIN = 1_000
_CANDIDATES_MAX = 8_192
# Byte-level vocabularies write a leading space as this character.
_SPACE = "\u0120"


@dataclass(frozen=True, slots=True)
class Workload:
    """``users`` send requests at the same time, each ``turns`` of them, one after the other.

    A prompt is ``shared_tokens`` that all have in common, then ``own_tokens``. In a conversation
    (``is_talk``), a later prompt is everything said so far, then ``added_tokens``. ``speed_aim`` is
    the aim, as a multiple of the best peer's output tokens a second.
    """

    users: int
    turns: int
    shared_tokens: int
    own_tokens: int
    added_tokens: int
    output_tokens: int
    speed_aim: float

    @property
    def is_talk(self) -> bool:
        return self.added_tokens > 0


WORKLOADS = {
    "single": Workload(1, 2, 0, 512, 0, 128, 1.3),
    "8 at once": Workload(8, 1, 0, 512, 0, 128, 1.8),
    "32 at once": Workload(32, 1, 0, 512, 0, 128, 1.8),
    "shared": Workload(16, 1, 1024, 16, 0, 64, 2.0),
    "chat": Workload(4, 4, 0, 512, 16, 128, 1.5),
}


@dataclass(frozen=True, slots=True)
class Word:
    """A token and its ``text``, which is tokenised to that one token wherever it stands."""

    token: int
    text: str


Prompt = tuple[Word, ...]


def words_of(tokenizer: Tokenizer) -> list[Word]:
    """Words to build prompts from. Raises ``ValueError`` when the vocabulary has too few."""
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
    candidates = [
        Word(token, " " + piece[1:])
        for piece, token in sorted(vocabulary.items(), key=lambda item: item[1])
        if len(piece) > 3 and piece[0] == _SPACE and piece[1:].isascii() and piece[1:].isalpha()
    ][:_CANDIDATES_MAX]
    encoded = tokenizer.encode_batch([word.text for word in candidates], add_special_tokens=False)
    words = [word for word, one in zip(candidates, encoded, strict=True) if one.ids == [word.token]]
    if len(words) < _WORDS_MIN:
        raise ValueError(
            f"only {len(words)} tokens of the model are whole words, {_WORDS_MIN} are needed; "
            "use a model with a byte-level tokenizer, such as those of random_model.py"
        )
    return words


def words_of_model(folder: Path) -> list[Word]:
    """``words_of`` the ``tokenizer.json`` of a model folder."""
    return words_of(Tokenizer.from_file(str(folder / "tokenizer.json")))


def prompts(workload: Workload, words: list[Word], seed: str) -> list[list[Prompt]]:
    """The prompts of each user, turn by turn. In a conversation, a later one is only what is
    added."""
    draw = random.Random(seed)

    def some(count: int) -> Prompt:
        return tuple(draw.choices(words, k=count))

    shared = some(workload.shared_tokens)
    everyone: list[list[Prompt]] = []
    for _ in range(workload.users):
        said = [shared + some(workload.own_tokens)]
        for _ in range(workload.turns - 1):
            if workload.is_talk:
                said.append(some(workload.added_tokens))
            else:
                said.append(shared + some(workload.own_tokens))
        everyone.append(said)
    return everyone


def ids(prompt: Prompt) -> list[int]:
    return [word.token for word in prompt]


def text(prompt: Prompt) -> str:
    return "".join(word.text for word in prompt)
