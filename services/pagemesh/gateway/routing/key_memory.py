"""Finds out how much of a prompt is cached where, and remembers the keys of cached prefixes, so
that a long prompt that comes again is not hashed again page by page.

Keys are remembered for blocks of pages that some host had cached whole. A block is looked up by the
key before it and the tokens in it, so prompts that share a prefix share its blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from pagemesh.gateway.routing.page_index import PageIndex
from pagemesh.wire.identity import key_chain
from pagemesh.wire.tokens import U32

BLOCK_PAGES = 16
TOKEN_COUNT_MAX = 1 << 20
"""Tokens remembered: about ten megabytes with pages of 16 tokens, and less with larger ones."""
_Block = tuple[bytes, int, bytes]
"""Root, the key before the block (0: none), and the block's tokens as uint32 bytes."""


class KeyMemory:
    """Keys under one ``secret``. Pure."""

    def __init__(self, secret: bytes, *, token_count_max: int = TOKEN_COUNT_MAX) -> None:
        self._secret = secret
        self._token_count_max = token_count_max
        self._token_count = 0
        self._keys: OrderedDict[_Block, tuple[int, ...]] = OrderedDict()

    def cached_pages(
        self, root: bytes, tokens: U32, page_size: int, hosts: Mapping[str, PageIndex]
    ) -> dict[str, int]:
        """By host: how many pages of ``tokens``, in a row from their start, are cached as far as
        its index knows. Keys are computed only while some host may have them."""
        found = dict.fromkeys(hosts, 0)
        holding = {name: index for name, index in hosts.items() if len(index)}
        block_tokens, parent = BLOCK_PAGES * page_size, 0
        for start in range(0, len(tokens) if holding else 0, block_tokens):
            part = tokens[start : start + block_tokens]
            block = (root, parent, part.tobytes())
            keys = self._keys.get(block)
            if keys is None:
                keys = self._new(block, part, page_size, holding)
            else:
                self._keys.move_to_end(block)
            for name, index in list(holding.items()):
                count = index.leading(keys)
                found[name] += count
                if count < BLOCK_PAGES:
                    del holding[name]
            if not holding:
                break
            parent = keys[-1]
        return found

    def _new(
        self, block: _Block, part: U32, page_size: int, holding: Mapping[str, PageIndex]
    ) -> tuple[int, ...]:
        """The keys of ``part`` up to the first that no host has."""
        root, parent, _ = block
        made: list[int] = []
        for key in key_chain(self._secret, root, part, page_size, parent=parent):
            for index in holding.values():
                if key in index:
                    made.append(key)
                    break
            else:
                break
        if len(made) == BLOCK_PAGES:
            self._keys[block] = tuple(made)
            self._token_count += len(part)
            while self._token_count > self._token_count_max:
                oldest, _ = self._keys.popitem(last=False)
                self._token_count -= _token_count(oldest)
        return tuple(made)

    def check(self) -> None:
        """Raises ``AssertionError`` when an invariant is broken."""
        assert self._token_count == sum(map(_token_count, self._keys))
        assert self._token_count <= self._token_count_max
        assert all(len(keys) == BLOCK_PAGES for keys in self._keys.values())


def _token_count(block: _Block) -> int:
    _, _, tokens = block
    return len(tokens) // 4
