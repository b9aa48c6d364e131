"""Makes a whole plan of a request by the arithmetic of ``memory``; prints nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagemesh.cli.planning.formats import KvFormat
from pagemesh.cli.planning.lifetime import Pace, WasteOverTime, waste_over_time
from pagemesh.cli.planning.memory import (
    PAGE_SIZES,
    Budget,
    PageShape,
    Waste,
    contiguous_waste,
    page_count,
    page_shape,
    paged_waste,
    session_count,
    tier_page_count,
    windowed_session_bytes,
    windowed_session_count,
)
from pagemesh.cli.planning.shape import ModelShape
from pagemesh.cli.planning.weights import DTYPE_BYTES, Weights
from pagemesh.runtime.sizes import shown_both
from pagemesh.wire.errors import ConfigError

TYPE_ASSUMED = "bfloat16"
"""Of a checkpoint that does not say its type: that of nearly all that are published today."""
_SESSION_TOKENS = (2_048, 8_192, 32_768, 131_072)


@dataclass(frozen=True, slots=True)
class Asked:
    """What to plan. ``memory_bytes`` is that of one device, None if the size of the pool was given
    instead; tiers of 0 bytes are left out."""

    name: str
    shape: ModelShape
    kv: KvFormat
    page_size: int
    device_count: int
    weights: Weights | None
    memory_bytes: int | None
    share: float
    pool_bytes: int
    session_tokens: int | None
    shared_tokens: int
    lengths: tuple[int, ...]
    reserve_tokens: int | None
    host_bytes: int
    disk_bytes: int
    pace: Pace
    up_kv: str
    """The KV type that `pagemesh up` would use with the current settings."""
    up_says: str = ""
    """Why `pagemesh up` might not run this model; empty if it does."""
    is_type_told: bool = True
    """Whether config.json or weights say the type of the checkpoint; else it is assumed."""


@dataclass(frozen=True, slots=True)
class SessionFit:
    """``fit`` sequences of ``tokens`` fit at once; each takes ``count_bytes``."""

    tokens: int
    count_bytes: int
    fit: float


@dataclass(frozen=True, slots=True)
class Tier:
    name: str
    count_bytes: int
    pages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The result; ``report`` turns it into text or JSON."""

    name: str
    shape: ModelShape
    page: PageShape
    multi_head_page: PageShape
    weights: Weights | None
    budget: Budget | None
    pages: int
    sessions: tuple[SessionFit, ...]
    shared_tokens: int
    windowed: SessionFit | None
    """The last of ``sessions``, if windowed layers freed pages that the window has left behind."""
    tiers: tuple[Tier, ...]
    pace: Pace
    waste_tokens: int
    """The sequence length that waste is computed for if no lengths were given."""
    lengths: tuple[int, ...]
    wastes: tuple[tuple[str, Waste], ...]
    over_time: tuple[tuple[int, WasteOverTime], ...]
    """Page size in tokens, and what pages of that size waste while sequences live."""
    page_sizes: tuple[tuple[int, int], ...]
    """Page size in tokens, and the bytes of such a page."""
    notes: tuple[str, ...]


def make_plan(asked: Asked) -> Plan:
    """Raises ``ConfigError`` for what does not fit or is impossible."""
    shape = asked.shape
    _check_lengths(asked)
    page = page_shape(shape, asked.kv, asked.page_size, asked.device_count)
    budget = _budget(asked)
    device_kv_bytes = asked.pool_bytes // asked.device_count
    if budget is not None:
        device_kv_bytes = budget.device_kv_bytes
    pages = page_count(page, device_kv_bytes)
    if pages == 0:
        raise ConfigError(
            f"not one page of {shown_both(page.page_bytes)} fits into "
            f"{shown_both(device_kv_bytes * asked.device_count)}; give more memory or smaller pages"
        )
    sessions = tuple(_session(page, pages, tokens, asked) for tokens in _session_lengths(asked))
    waste_tokens = asked.session_tokens or min(2_048, shape.context_tokens_max)
    windowed = None
    if shape.window_layer_count:
        tokens = sessions[-1].tokens
        each = windowed_session_bytes(page, shape, tokens)
        fit = windowed_session_count(page, shape, pages, tokens, asked.shared_tokens)
        windowed = SessionFit(tokens, each, fit)
    return Plan(
        name=asked.name,
        shape=shape,
        page=page,
        multi_head_page=replace(page, kv_head_count=shape.head_count),
        weights=asked.weights,
        budget=budget,
        pages=pages,
        sessions=sessions,
        shared_tokens=asked.shared_tokens,
        windowed=windowed,
        tiers=_tiers(asked, page, pages),
        pace=asked.pace,
        waste_tokens=waste_tokens,
        lengths=asked.lengths,
        wastes=_wastes(asked, waste_tokens),
        over_time=_over_time(asked, waste_tokens),
        page_sizes=tuple(
            (size, replace(page, page_size=size).page_bytes) for size in _page_sizes(asked)
        ),
        notes=_notes(asked),
    )


def _budget(asked: Asked) -> Budget | None:
    if asked.memory_bytes is None:
        return None
    if asked.weights is None:
        raise ConfigError(
            f"{asked.name}: nothing says how large the weights are; give --weights SIZE, or "
            "--pool-bytes instead of --memory"
        )
    budget = Budget(asked.memory_bytes, asked.share, asked.weights.count_bytes, asked.device_count)
    if budget.kv_bytes == 0:
        raise ConfigError(
            f"weights of {shown_both(budget.weights_bytes)} leave no room in "
            f"{shown_both(budget.usable_bytes)}; add devices (--tensor-parallel), memory or share"
        )
    return budget


def _check_lengths(asked: Asked) -> None:
    """Raises ``ConfigError`` for more tokens than a sequence can have, or than are reserved."""
    limit = asked.shape.context_tokens_max
    if asked.reserve_tokens is not None:
        contiguous_waste(asked.lengths, asked.reserve_tokens)  # raises for a longer one
    for flag, tokens in (
        ("--session-tokens", asked.session_tokens or 0),
        ("--lengths", max(asked.lengths, default=0)),
        ("--shared-tokens", asked.shared_tokens),
    ):
        if tokens > limit:
            raise ConfigError(f"{flag} {tokens} exceeds the model's context of {limit}")
    if asked.session_tokens is not None and asked.shared_tokens > asked.session_tokens:
        raise ConfigError(
            f"--shared-tokens {asked.shared_tokens} exceeds --session-tokens "
            f"{asked.session_tokens}; sessions share what all of them begin with"
        )


def _session_lengths(asked: Asked) -> tuple[int, ...]:
    limit = asked.shape.context_tokens_max
    if asked.session_tokens is not None:
        return (asked.session_tokens,)
    return (*(tokens for tokens in _SESSION_TOKENS if tokens < limit), limit)


def _session(page: PageShape, pages: int, tokens: int, asked: Asked) -> SessionFit:
    fit = session_count(page, pages, tokens, asked.shared_tokens)
    return SessionFit(tokens, page.pages_for(tokens) * page.page_bytes, fit)


def _tiers(asked: Asked, page: PageShape, pages: int) -> tuple[Tier, ...]:
    if not asked.host_bytes and not asked.disk_bytes:
        return ()
    found = [Tier("device", pages * page.page_bytes, pages)]
    for name, size in (("host", asked.host_bytes), ("disk", asked.disk_bytes)):
        if size:
            count = tier_page_count(page, size)
            found.append(Tier(name, count * page.page_bytes, count))
    return tuple(found)


def _wastes(asked: Asked, waste_tokens: int) -> tuple[tuple[str, Waste], ...]:
    """Waste of contiguous allocation and, if lengths were given, of each page size: the tail of a
    single made-up length would say nothing."""
    lengths = asked.lengths or (waste_tokens,)
    reserved = asked.reserve_tokens or asked.shape.context_tokens_max
    sizes = _page_sizes(asked) if asked.lengths else ()
    return (
        (f"contiguous, {reserved:,} reserved", contiguous_waste(lengths, reserved)),
        *((f"pages of {size}", paged_waste(lengths, size)) for size in sizes),
    )


def _over_time(asked: Asked, waste_tokens: int) -> tuple[tuple[int, WasteOverTime], ...]:
    lengths = asked.lengths or (waste_tokens,)
    return tuple(
        (size, waste_over_time(lengths, size, asked.pace, asked.shared_tokens))
        for size in _page_sizes(asked)
    )


def _page_sizes(asked: Asked) -> list[int]:
    return sorted({*PAGE_SIZES, asked.page_size})


def _notes(asked: Asked) -> tuple[str, ...]:
    notes = [asked.up_says] if asked.up_says else []
    if asked.shape.longer_context:
        notes.append(
            f"config.json also says {asked.shape.longer_context}; what counts here, and for "
            f"`pagemesh up`, is the context of {asked.shape.context_tokens_max:,}"
        )
    if not asked.is_type_told:
        notes.append(
            f"neither config.json nor weights say the type: counted as {TYPE_ASSUMED} unless "
            "--dtype and --kv-dtype say otherwise"
        )
    if asked.shape.dtype not in DTYPE_BYTES:
        notes.append(
            f"the config's type {asked.shape.dtype[:40]!r} is none that pagemesh knows: counted as "
            "bfloat16 unless --dtype and --kv-dtype say otherwise"
        )
    if not asked.kv.served:
        scales = "; its scales are estimated" if asked.kv.scale_bits else ""
        notes.append(f"pagemesh does not keep KV as {asked.kv.name} yet{scales}")
    elif asked.kv.name != asked.up_kv:
        notes.append(
            f"`pagemesh up` keeps KV as {asked.up_kv} (its --kv-dtype); to plan that: "
            f"--kv-dtype {asked.up_kv}"
        )
    if asked.device_count > 1:
        notes.append("pagemesh does not split a model over devices yet")
    if asked.shape.window_layer_count:
        notes.append("all layers keep all tokens: pages of windowed layers do not go early yet")
    if asked.host_bytes:
        notes.append(
            "the host's memory (up's --host-bytes) takes pages from a device alone; with a disk "
            "(--disk-dir) it holds a part of what is there"
        )
    return tuple(notes)
