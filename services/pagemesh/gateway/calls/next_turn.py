"""What a talk's next turn will begin with, tokenised while nobody waits for it.

Clients send all that was said so far, so that an answer comes back as part of the next prompt. When
it has been given its tokens are remembered (``words.token_memory``), and of the next turn only what
the user writes is new.
"""

from __future__ import annotations

import contextlib

from pagemesh.gateway.api.openai_api import Ask, ChatPrompt
from pagemesh.gateway.words.templates import TemplateRefused
from pagemesh.gateway.words.tokens import Tokens

ANSWER_CHARACTERS_MAX = 256 << 10
"""Of a longer answer nothing is kept for that."""


class NextTurn:
    """Made for each call, of use for chats with one answer. ``owner``: see ``Tokens.encode``."""

    def __init__(self, ask: Ask, tokens: Tokens, owner: bytes) -> None:
        self._tokens = tokens
        self._owner = owner
        self._talk: ChatPrompt | None = None
        self._parts: list[str] = []
        self._said_characters = 0
        talk = ask.prompts[0]
        if isinstance(talk, ChatPrompt) and ask.best_of == 1 and tokens.remembers:
            self._talk = None if talk.continue_final_message else talk

    def said(self, text: str) -> None:
        """``text`` of the answer was given."""
        if self._talk is None:
            return
        self._parts.append(text)
        self._said_characters += len(text)
        if self._said_characters > ANSWER_CHARACTERS_MAX:
            self._talk = None
            self._parts.clear()

    @property
    def size_bytes(self) -> int:
        """About how much ``prepare`` works on."""
        if self._talk is None:
            return 0
        asked = sum(len(str(message.get("content", ""))) for message in self._talk.messages)
        return asked + self._said_characters

    def prepare(self) -> None:
        """Tokenise what was said. Takes a while; raises nothing."""
        if self._talk is None or not self._said_characters:
            return
        answer = {"role": "assistant", "content": "".join(self._parts)}
        with contextlib.suppress(TemplateRefused):
            text = self._tokens.render_chat(
                [*self._talk.messages, answer],
                add_generation_prompt=False,
                extra=self._talk.template_values,
            )
            self._tokens.encode(text, add_special_tokens=False, owner=self._owner)
