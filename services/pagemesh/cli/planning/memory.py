"""The arithmetic of KV memory: pages, sessions, waste. No files, no output.

    bytes a token = 2 x layers x KV heads x head width x bits / 8, plus the scales
    pages         = (memory x share - weights) / bytes a page
    sessions      = pages / ceil(tokens / page size)

With tensor parallelism, every device holds its share of the KV heads of each page; with more
devices than heads, heads are replicated. One ledger counts the pages of all devices, so the
fullest device decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagemesh.cli.planning.formats import KvFormat, page_bytes
from pagemesh.cli.planning.shape import ModelShape
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.pool_format import PoolFormat

PAGE_SIZES = (16, 32, 64, 128, 256)
DEVICE_COUNT_MAX = 1_024
RECORD_BYTES = 128
"""What a page takes in a tier beside its own bytes: its record in the index."""
TAIL_SHARE_MAX = 0.04


@dataclass(frozen=True, slots=True)
class PageShape:
    """One page over all devices."""

    layer_count: int
    kv_head_count: int
    """KV heads of the model; a device holds ``device_head_count`` of them."""
    head_dim: int
    page_size: int
    kv: KvFormat
    device_count: int

    @property
    def device_head_count(self) -> int:
        return max(1, self.kv_head_count // self.device_count)

    @property
    def copies(self) -> int:
        """How many devices hold the same head."""
        return max(1, self.device_count // self.kv_head_count)

    @property
    def device_page_bytes(self) -> int:
        """Bytes of one page on one device. Raises ``ConfigError``."""
        try:
            return page_bytes(
                self.kv, layers=self.layer_count, kv_heads=self.device_head_count,
                head_dim=self.head_dim, page_size=self.page_size,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(f"no page holds K and V of this model: {error}") from None

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on all devices."""
        return self.device_page_bytes * self.device_count

    @property
    def token_bytes(self) -> float:
        """Bytes of one token on all devices."""
        return self.page_bytes / self.page_size

    @property
    def header_bytes(self) -> int:
        """Bytes of a page's header, which is stored apart from the page, in host memory."""
        return PoolFormat(1, self.page_size, self.device_page_bytes).header_bytes

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


def page_shape(shape: ModelShape, kv: KvFormat, page_size: int, device_count: int) -> PageShape:
    """The pages of ``shape`` on ``device_count`` devices. Raises ``ConfigError`` when the heads
    cannot be split evenly."""
    heads, kv_heads = shape.head_count, shape.kv_head_count
    if heads % device_count or (kv_heads % device_count and device_count % kv_heads):
        raise ConfigError(
            f"--tensor-parallel {device_count}: {heads} query and {kv_heads} key/value heads "
            f"cannot be shared out evenly; {even_splits(heads, kv_heads)} can"
        )
    return PageShape(shape.layer_count, kv_heads, shape.head_dim, page_size, kv, device_count)


def even_splits(heads: int, kv_heads: int) -> str:
    """The device counts that the heads can be split over, up to ``DEVICE_COUNT_MAX``."""
    counts = range(1, min(heads, DEVICE_COUNT_MAX) + 1)
    found = [n for n in counts if not heads % n and not (kv_heads % n and n % kv_heads)]
    return ", ".join(map(str, found))


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory for KV. ``memory_bytes`` is that of one device; the weights are split evenly."""

    memory_bytes: int
    share: float
    weights_bytes: int
    device_count: int

    @property
    def usable_bytes(self) -> int:
        """Usable memory of all devices."""
        return int(self.memory_bytes * self.share) * self.device_count

    @property
    def kv_bytes(self) -> int:
        return max(0, self.usable_bytes - self.weights_bytes)

    @property
    def device_kv_bytes(self) -> int:
        return self.kv_bytes // self.device_count

    @property
    def weights_share(self) -> float:
        """The weights' share of the usable memory; above 1 they do not fit."""
        return self.weights_bytes / self.usable_bytes if self.usable_bytes else float("inf")


def page_count(page: PageShape, device_kv_bytes: int) -> int:
    """How many pages fit on each device, which is also how many the ledger has."""
    return device_kv_bytes // page.device_page_bytes


def tier_page_count(page: PageShape, tier_bytes: int) -> int:
    """How many pages fit into a tier of ``tier_bytes``, on disk or in host memory."""
    return tier_bytes // (page.page_bytes + RECORD_BYTES)


def session_count(page: PageShape, pages: int, tokens: int, shared_tokens: int = 0) -> float:
    """How many sequences of ``tokens`` fit at once, fully grown, when the first
    ``shared_tokens`` of each are the same. Whole pages are shared, and at least one token is a
    sequence's own."""
    shared = _shared_pages(page, tokens, shared_tokens)
    own = page.pages_for(tokens) - shared
    return max(0, pages - shared) / own


def _shared_pages(page: PageShape, tokens: int, shared_tokens: int) -> int:
    return min(shared_tokens, tokens - 1) // page.page_size


def shared_saving(sequence_count: int) -> float:
    """Share of a prefix's memory that is saved if ``sequence_count`` sequences share it."""
    return 1 - 1 / sequence_count


def windowed_session_bytes(page: PageShape, shape: ModelShape, tokens: int) -> int:
    """Bytes of one sequence of ``tokens``, if windowed layers freed the pages that the window has
    left behind. They hold one page more than the window has, since it may start within a page."""
    return sum(held * each_bytes for held, each_bytes in _held_pages(page, shape, tokens))


def windowed_session_count(
    page: PageShape, shape: ModelShape, pages: int, tokens: int, shared_tokens: int = 0
) -> float:
    """``session_count``, if windowed layers freed the pages that the window has left behind. Of the
    shared pages, they hold one copy of those that the window still reaches."""
    shared = _shared_pages(page, tokens, shared_tokens)
    shared_bytes = own_bytes = 0
    for held, each_bytes in _held_pages(page, shape, tokens):
        given_back = page.pages_for(tokens) - held
        held_shared = max(0, shared - given_back)
        shared_bytes += held_shared * each_bytes
        own_bytes += (held - held_shared) * each_bytes
    return max(0, pages * page.page_bytes - shared_bytes) / own_bytes


def _held_pages(page: PageShape, shape: ModelShape, tokens: int) -> list[tuple[int, int]]:
    """What one sequence of ``tokens`` holds, in layers without and with a window: the number of
    pages, and the bytes of each."""
    every = page.pages_for(tokens)
    held = min(every, page.pages_for(shape.window_tokens) + 1)
    full_layers = shape.layer_count - shape.window_layer_count
    groups = ((every, full_layers), (held, shape.window_layer_count))
    return [
        (count, replace(page, layer_count=layers).page_bytes) for count, layers in groups if layers
    ]


@dataclass(frozen=True, slots=True)
class Waste:
    """Token slots that are allocated and hold nothing."""

    wasted_slots: int
    taken_slots: int

    @property
    def share(self) -> float:
        return self.wasted_slots / self.taken_slots if self.taken_slots else 0.0


def paged_waste(lengths: Sequence[int], page_size: int) -> Waste:
    """The tails of the last pages of sequences of ``lengths`` tokens."""
    taken = sum(-(-tokens // page_size) * page_size for tokens in lengths)
    return Waste(taken - sum(lengths), taken)


def contiguous_waste(lengths: Sequence[int], reserved_tokens: int) -> Waste:
    """What reserving ``reserved_tokens`` for each sequence wastes. Raises ``ConfigError`` for a
    longer sequence."""
    longest = max(lengths, default=0)
    if longest > reserved_tokens:
        raise ConfigError(
            f"--lengths: {longest} tokens exceed the {reserved_tokens} that contiguous "
            "allocation reserves; raise --reserve-tokens"
        )
    taken = reserved_tokens * len(lengths)
    return Waste(taken - sum(lengths), taken)


def mean_tail_slots(page_size: int) -> float:
    """The mean tail if a sequence is equally likely to end at any slot of a page."""
    return (page_size - 1) / 2


def length_for_tail(page_size: int, share: float = TAIL_SHARE_MAX) -> float:
    """Sequence length from which on the mean tail is less than ``share`` of the slots."""
    return (1 / share - 1) * mean_tail_slots(page_size)


def growth_slack(tokens: int, page_size: int, growth_pages: int) -> float:
    """Maximum share of a sequence's slots that are held ahead of need while it grows."""
    ahead = growth_pages * page_size
    return ahead / (tokens + ahead)
