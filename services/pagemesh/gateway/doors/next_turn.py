"""Tokenises answers for a conversation's next turn, while nobody waits for it.

Clients send the whole conversation each time, so an answer comes back as part of the next prompt.
Once it has been given, its tokens are remembered (``words.token_memory``), and of the next turn
only what the user writes is new.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

from pagemesh.gateway.api.openai_api import Ask, ChatPrompt
from pagemesh.gateway.words.templates import TemplateRefused
from pagemesh.gateway.words.tokens import Tokens
from pagemesh.runtime.logs import get_logger

BODY_BYTES_MAX = 64 << 10
"""Rendering a longer conversation once more would hold the interpreter lock for too long."""
ANSWER_CHARACTERS_MAX = 64 << 10
WAITING_MAX = 64
"""Answers that wait to be tokenised; any more are skipped."""
_log = get_logger(__name__)


class NextTurn:
    """Gathers the answer of one call; of use only for short chats with one answer."""

    def __init__(self, ask: Ask, body_bytes: int) -> None:
        self._talk: ChatPrompt | None = None
        self._parts: list[str] = []
        self._characters = 0
        talk = ask.prompts[0]
        is_short = body_bytes <= BODY_BYTES_MAX
        if isinstance(talk, ChatPrompt) and ask.best_of == 1 and is_short:
            if not talk.continue_final_message and not ask.add_special_tokens:
                self._talk = talk

    def said(self, text: str) -> None:
        """``text``, a part of the answer, was given."""
        if self._talk is None:
            return
        self._parts.append(text)
        self._characters += len(text)
        if self._characters > ANSWER_CHARACTERS_MAX:
            self._talk = None
            self._parts.clear()

    def talk(self) -> tuple[ChatPrompt, str] | None:
        """The prompt and its answer, if they may come back."""
        return (self._talk, "".join(self._parts)) if self._talk and self._characters else None


class NextTurns:
    """Tokenises answers on a thread of its own. ``close`` it."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._room = threading.Semaphore(WAITING_MAX)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="next-turn")

    def expect(self, turn: NextTurn, owner: bytes) -> None:
        """An answer was given: tokenise it soon, if there is room. ``owner``: see
        ``Tokens.encode``."""
        talk = turn.talk()
        if talk is not None and self._room.acquire(blocking=False):
            with contextlib.suppress(RuntimeError):  # closed: the gateway is going down
                self._thread.submit(self._prepare, *talk, owner)

    def close(self) -> None:
        """Drop the answers that still wait."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, talk: ChatPrompt, answer: str, owner: bytes) -> None:
        self._room.release()
        try:
            text = self._tokens.render_chat(
                [*talk.messages, {"role": "assistant", "content": answer}],
                add_generation_prompt=False,
                extra=talk.template_values,
            )
            self._tokens.remember(text, owner=owner, characters_max=ANSWER_CHARACTERS_MAX)
        except TemplateRefused:
            return  # the next turn will be refused too
        except Exception as error:
            _log.error("gateway.next_turn_crashed", error=error)
