"""What a message must be like for this model, beyond what its type says.

An id outside the vocabulary would crash a step that others share, so it is refused at the door.
"""

from __future__ import annotations

from pagemesh.wire.errors import Malformed
from pagemesh.wire.messages import Message, SequenceKey
from pagemesh.wire.tokens import unpack
from pagemesh.wire.work_messages import Attach, Submit


def vet(message: Message, *, vocab_tokens: int) -> None:
    """Raises ``Malformed``, naming the field, for token ids outside of the vocabulary."""
    match message:
        case Submit():
            generated = [start.generated for start in message.choices]
        case Attach():
            generated = [message.generated]
        case _:
            return
    _vet_tokens("prompt", message.prompt, vocab_tokens)
    for tokens in generated:
        _vet_tokens("generated", tokens, vocab_tokens)


def keys_of(message: Submit | Attach) -> list[SequenceKey]:
    """The sequences that ``message`` brings."""
    if isinstance(message, Attach):
        return [message.key]
    return [
        SequenceKey(request=message.request, attempt=message.attempt, choice=start.choice)
        for start in message.choices
    ]


def _vet_tokens(name: str, packed: bytes, vocab_tokens: int) -> None:
    tokens = unpack(packed)
    if len(tokens) and int(tokens.max()) >= vocab_tokens:
        raise Malformed(f"{name}: token {int(tokens.max())} is outside of the {vocab_tokens} known")
