"""Checks of messages against the served model, beyond what their types enforce.

An id outside the vocabulary would crash a step that other sequences share, so it is refused on
arrival.
"""

from __future__ import annotations

from pagemesh.wire.errors import Malformed, NoCapacity
from pagemesh.wire.messages import Message, SequenceKey
from pagemesh.wire.tokens import unpack
from pagemesh.wire.work_messages import Attach, Submit

_ID_BYTES, _CHOSEN_BYTES, _ALTERNATIVE_BYTES = 4, 4, 8
_SPARE_BYTES = 64 << 10
"""For everything else in a message of frames."""


def vet(
    message: Message, *, vocab_tokens: int, message_bytes_max: int, output_bytes_max: int
) -> None:
    """Raises ``Malformed``, naming the field, for token ids outside the vocabulary and for beam
    searches that cannot be run. Raises ``NoCapacity`` for a prompt's scores or a search's answer
    that would not fit into one message, and for prompt scores of all choices that together exceed
    both a message and half of ``output_bytes_max``, the most that may wait to be sent."""
    match message:
        case Submit():
            _vet_scores(message, message_bytes_max, output_bytes_max)
            _vet_beams(message, message_bytes_max)
            generated = [start.generated for start in message.choices]
        case Attach():
            generated = [message.generated]
        case _:
            return
    _vet_tokens("prompt", message.prompt, vocab_tokens)
    for tokens in generated:
        _vet_tokens("generated", tokens, vocab_tokens)


def keys_of(message: Submit | Attach) -> list[SequenceKey]:
    """The keys of the sequences in ``message``."""
    if isinstance(message, Attach):
        return [message.key]
    return [
        SequenceKey(request=message.request, attempt=message.attempt, choice=start.choice)
        for start in message.choices
    ]


def _vet_scores(message: Submit, message_bytes_max: int, output_bytes_max: int) -> None:
    """Every choice of a request gets the prompt's scores: in a message of its own if they are
    large, but all at the same time. What exceeds the connection's buffer would be lost."""
    if not message.prompt_logprobs:
        return
    width = max(message.sampling.logprobs or 0, 0)
    token_bytes = _CHOSEN_BYTES + width * _ALTERNATIVE_BYTES
    needed = (len(message.prompt) // 4) * token_bytes
    if needed + _SPARE_BYTES > message_bytes_max:
        raise NoCapacity(
            f"the prompt's log-probabilities take {needed} bytes, and a message holds "
            f"{message_bytes_max}; ask for fewer alternatives or tokens"
        )
    count, at_once = len(message.choices), max(output_bytes_max // 2, message_bytes_max)
    if count * needed > at_once:
        raise NoCapacity(
            f"the prompt's log-probabilities take {count * needed} bytes for {count} choices, "
            f"{at_once} can be sent at once; ask for fewer alternatives, choices or tokens"
        )


def _vet_beams(message: Submit, message_bytes_max: int) -> None:
    """A beam search is one sequence that starts at the prompt, and its answer is one message."""
    sampling = message.sampling
    beams = sampling.beams
    if beams is None:
        return
    if beams.keep > beams.width:
        raise Malformed(f"beams: keep {beams.keep} exceeds width {beams.width}")
    if len(message.choices) > 1 or message.choices[0].generated or message.prompt_logprobs:
        raise Malformed(
            "beams: only one choice, without generated tokens or prompt log-probabilities"
        )
    if not sampling.max_tokens:
        raise Malformed("beams: max_tokens is 0")
    if sampling.grammar:
        raise Malformed("beams: a search cannot follow a grammar")
    token_bytes = _ID_BYTES + _CHOSEN_BYTES + max(sampling.logprobs or 0, 0) * _ALTERNATIVE_BYTES
    needed = beams.keep * sampling.max_tokens * token_bytes
    if needed + _SPARE_BYTES > message_bytes_max:
        raise NoCapacity(
            f"the answers of the search may take {needed} bytes, and a message holds "
            f"{message_bytes_max}; lower max_tokens, n or the alternatives"
        )


def _vet_tokens(name: str, packed: bytes, vocab_tokens: int) -> None:
    tokens = unpack(packed)
    if len(tokens) and int(tokens.max()) >= vocab_tokens:
        raise Malformed(
            f"{name}: token id {int(tokens.max())} is not in the vocabulary of {vocab_tokens} "
            "tokens"
        )
