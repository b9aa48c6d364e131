"""Which services are there. Every service announces itself when it starts, when asked, once a
period, and when it leaves; one that is silent for ``PRESENCE_LOST_MS`` counts as gone."""

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
    """What a worker asks the pager for with a prompt; gateways use it to ask on its behalf."""

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
    """Workers only: the cores on which their steps take turns, as a little-endian bit mask; empty:
    they take no turns."""
    needs: PageNeeds | None = None
    """Workers only; None: the worker asks for itself."""
    event_sequence: U64 = 0
    """Pagers only: the last ``PagesChanged`` sequence; reveals that the last event was lost."""
    epoch: U64 = 0
    free_pages: Count = 0
    """Pagers only: free and evictable."""
    secret_tag: Count = 0
    """Pagers only: fingerprint of the secret that keys their prefix ids (``identity``)."""


@registered("presence.ask")
class AskPresence(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks every service to announce itself now."""
