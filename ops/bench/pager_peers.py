"""Prefix indexes of other projects, behind the interface of ``pager_adapter``:

    prepare   make the keys or hashes of a prompt that the index needs
    match     match the longest cached prefix and pin it; returns its pages
    alloc     allocate pages for the rest of the prompt
    commit    all full pages of the prompt become matchable
    release   the pin ends, pages stay cached

This repository holds no code of these projects: they are imported from folders into which the user
has installed them (``pip install --no-deps --target``). Modules that they import but that these
calls never use, above all GPU kernels, are replaced by empty stubs.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
_PARENTS_APART = 32
"""Distance of the blocks that a later prompt may continue from, as remembered for Dynamo's
worker."""
_UNUSED_BY_SGLANG = (
    "sglang.srt.configs", "sglang.srt.multimodal", "sglang.srt.layers", "sglang.kernels",
    "compressed_tensors", "torchvision", "IPython", "traitlets", "aiohttp", "zmq", "PIL",
    "multidict", "yarl", "partial_json_parser", "dill",
)  # fmt: skip


class SglangIndex:
    """SGLang's ``RadixCache``, a tree in Python, with its allocator of pages, on the CPU."""

    name = "sglang-py"

    def __init__(self, page_count: int, page_size: int) -> None:
        _leave_empty(*_UNUSED_BY_SGLANG)
        torch = importlib.import_module("torch")
        torch.set_num_threads(1)
        cache = "sglang.srt.mem_cache"
        base = importlib.import_module(f"{cache}.base_prefix_cache")
        self._cat = torch.cat
        self._match_params, self._insert_params = base.MatchPrefixParams, base.InsertParams
        self._key = importlib.import_module(f"{cache}.radix_cache").RadixKey
        paged = importlib.import_module(f"{cache}.allocator.paged").PagedTokenToKVPoolAllocator
        params = importlib.import_module(f"{cache}.cache_init_params").CacheInitParams
        self._page_size = page_size
        self._pool = paged(
            page_count * page_size, page_size, torch.float16, "cpu", None, need_sort=False
        )
        self._tree = self._planted(
            params(
                disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self._pool,
                page_size=page_size,
            )
        )  # fmt: skip

    def _planted(self, params: Any) -> Any:
        return importlib.import_module("sglang.srt.mem_cache.radix_cache").RadixCache(params)

    def native(self, tokens: Tokens) -> Any:
        found = array("q")
        found.frombytes(tokens.astype(np.int64).tobytes())
        return found

    def prepare(self, tokens: Any) -> dict[str, Any]:
        return {"key": self._key(tokens)}

    def match(self, request: dict[str, Any]) -> int:
        found = self._tree.match_prefix(self._match_params(key=request["key"]))
        request["pin"] = self._pin(found.last_device_node)
        request["matched"] = found.device_prefix_len
        request["above"] = self._tree.path_device_indices(found.last_device_node)
        return int(found.device_prefix_len) // self._page_size

    def alloc(self, request: dict[str, Any]) -> None:
        short = len(request["key"]) - request["matched"]
        request["own"] = self._pool.alloc(-(-short // self._page_size) * self._page_size)
        assert request["own"] is not None, "the pool is too small: nothing is evicted here"

    def commit(self, request: dict[str, Any]) -> None:
        full = len(request["key"]) // self._page_size * self._page_size
        slots = self._cat((request["above"], request["own"]))
        node = self._insert(request, slots[:full])
        before, request["pin"] = request["pin"], self._pin(node)
        self._unpin(before)
        request.update(tail=slots[full:], full=full, key=None, above=None, own=None)

    def release(self, request: dict[str, Any]) -> None:
        self._unpin(request["pin"])
        self._pool.free_segment(request["tail"], start_pos=request["full"])

    def cached_pages(self) -> int:
        tree = self._tree
        return int(tree.evictable_size() + tree.protected_size()) // self._page_size

    def _insert(self, request: dict[str, Any], slots: Any) -> Any:
        found = self._tree.insert(self._insert_params(key=request["key"], value=slots))
        known, matched = found.prefix_len, request["matched"]
        if known > matched:  # another request has inserted the same meanwhile
            self._pool.free_segment(slots[matched:known], start_pos=matched)
        return found.last_device_node

    def _pin(self, node: Any) -> Any:
        self._tree.inc_lock_ref(node)
        return node

    def _unpin(self, pin: Any) -> None:
        self._tree.dec_lock_ref(pin)


class SglangRustIndex(SglangIndex):
    """SGLang's ``UnifiedRadixCache`` with the core in Rust, which is its default, and
    the same allocator."""

    name = "sglang-rust"

    def _planted(self, params: Any) -> Any:
        cache = "sglang.srt.mem_cache"
        kind = importlib.import_module(f"{cache}.unified_cache.component_type").ComponentType
        params.tree_components, params.tree_core_backend = (kind.FULL,), "rust"
        tree = importlib.import_module(f"{cache}.unified_radix_cache").UnifiedRadixCache(params)
        assert "rust" in type(tree.tree_core).__name__.lower(), "it has another core"
        return tree

    def cached_pages(self) -> int:
        tree = self._tree
        return int(tree.full_evictable_size() + tree.full_protected_size()) // self._page_size

    def _insert(self, request: dict[str, Any], slots: Any) -> Any:
        params = self._insert_params(
            key=request["key"], value=slots, prev_prefix_len=request["matched"]
        )
        return self._tree.insert(params).last_device_node  # it frees the duplicates itself

    def _pin(self, node: Any) -> Any:
        return self._tree.lock(node)

    def _unpin(self, pin: Any) -> None:
        self._tree.unlock(pin)


class DynamoIndex:
    """Dynamo's ``RadixTree``, a router's index in Rust: hashes of blocks, and no pages to pin or
    to hand out. What is stored is told in JSON, as by its workers' events."""

    name = "dynamo"

    def __init__(self, page_count: int, page_size: int) -> None:
        core = importlib.import_module("dynamo._core")
        self._hashes, self._tree = core.compute_block_hash_for_seq, core.RadixTree()
        self._dumps = importlib.import_module("orjson").dumps
        self._page_size = page_size
        self._ends: dict[tuple[int, int], int] = {}
        """The block that a later prompt continues from, by position and hash; a worker would
        know."""
        self._block = self._event = 0

    def native(self, tokens: Tokens) -> list[int]:
        found: list[int] = tokens.tolist()
        return found

    def prepare(self, tokens: Sequence[int]) -> dict[str, Any]:
        return {"hashes": self._hashes(tokens, self._page_size)}

    def match(self, request: dict[str, Any]) -> int:
        scores = self._tree.find_matches(request["hashes"]).scores
        request["matched"] = max(scores.values()) if scores else 0
        return int(request["matched"])

    def alloc(self, request: dict[str, Any]) -> None:
        pass

    def commit(self, request: dict[str, Any]) -> None:
        hashes, matched, first = request["hashes"], request["matched"], self._block + 1
        parent = self._ends[matched, hashes[matched - 1]] if matched else None
        fresh = hashes[matched:]
        blocks = [
            {"block_hash": first + at, "tokens_hash": found} for at, found in enumerate(fresh)
        ]
        self._block += len(blocks)
        self._event += 1
        stored = {"stored": {"parent_hash": parent, "blocks": blocks}}
        self._tree.apply_event(0, self._dumps({"event_id": self._event, "data": stored}))
        for end in range(_PARENTS_APART, len(hashes) + 1, _PARENTS_APART):
            if end > matched:
                self._ends[end, hashes[end - 1]] = first + end - matched - 1

    def release(self, request: dict[str, Any]) -> None:
        pass

    def cached_pages(self) -> int:
        return self._block


PEERS = {kind.name: kind for kind in (SglangRustIndex, SglangIndex, DynamoIndex)}


class _Empty(types.ModuleType):
    """A stub module: every attribute exists and does nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


class _EmptyFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: tuple[str, ...]) -> None:
        self._roots = roots

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == root or fullname.startswith(root + ".") for root in self._roots):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def import_from(folders: Sequence[Path]) -> None:
    """Make imports prefer the packages in ``folders`` to the installed ones."""
    sys.path[:0] = [str(folder) for folder in folders]


def _leave_empty(*roots: str) -> None:
    if not any(isinstance(finder, _EmptyFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _EmptyFinder(roots))
