"""Who is there. Every service announces itself when it starts, when asked, once a period,
and when it leaves; silence for ``PRESENCE_LOST_MS`` means gone."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from pagemesh.wire.messages import (
    U64,
    Count,
    Digest,
    Message,
    Name,
    ShortText,
    Value,
    registered,
)

PRESENCE_PERIOD_MS = 500
PRESENCE_LOST_MS = 2_500

Role = Literal["gateway", "prefill", "decode", "pager"]
State = Literal["starting", "ready", "draining", "leaving"]


class Load(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a router needs to choose between workers."""

    running_count: Count = 0
    waiting_count: Count = 0
    waiting_tokens: Count = 0
    """Prompt tokens accepted and not computed yet."""
    sequence_count_max: Count = 0


class ModelFacts(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker serves. ``model_root`` names weights, tokenizer, position encoding, KV
    dtype and layout in one digest; a tenant's root is derived from it (``identity``)."""

    model: ShortText
    model_root: Digest
    context_tokens_max: Count
    vocab_tokens: Count
    page_size: Annotated[int, Meta(ge=1, le=256)]
    pool_pages: Count
    deterministic: bool


class PageNeeds(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker asks the pager for with a prompt, so that gateways can ask in its name."""

    growth_tokens: Count
    """Slots beyond the prompt, as far as the sequence can use them."""
    first_tokens: Count
    """As in ``Admit``."""

    def reserve_tokens(self, length: int, tokens_max: int) -> int:
        """As in ``Admit``: for a sequence of ``length`` tokens that fills ``tokens_max`` slots at
        most."""
        return max(length, min(length + self.growth_tokens, tokens_max))


@registered("presence.announce")
class Announce(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Role
    name: Name
    incarnation: U64
    host: Name
    state: State
    load: Load = Load()
    model: ModelFacts | None = None
    """Workers only."""
    cores: Annotated[bytes, Meta(max_length=128)] = b""
    """Workers only: the cores that their steps take turns on, a bit each, little-endian; empty:
    no turns are taken."""
    needs: PageNeeds | None = None
    """Workers only; None: they ask for themselves."""
    event_sequence: U64 = 0
    """Pagers only: the last ``PagesChanged`` sequence, so that a lost last event shows."""
    epoch: U64 = 0
    free_pages: Count = 0
    """Pagers only: free and evictable."""
    secret_tag: U64 = 0
    """Pagers only: which secret keys their prefix ids (``identity``)."""


@registered("presence.ask")
class AskPresence(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everyone: announce yourself now."""
