"""Paths are hashed block by block, and what is told does not depend on it."""

from __future__ import annotations

import random

import pytest
from tests.unit.pager.rig import ROOT, Rig, Worker
from tests.unit.pager.test_waterfall import ask
from xxhash import xxh3_64_intdigest

from pagemesh.pager.leases import waterfall
from pagemesh.pager.tree import departed
from pagemesh.pager.tree.departed import Departed, mark_count_for
from pagemesh.pager.tree.leaving import Why
from pagemesh.pager.tree.radix import Match, Node


def long_edge(rig: Rig, pages: int, shared_pages: int = 0) -> Node:
    """An idle edge of so many pages; ``shared_pages`` are above it, in an edge of their own."""
    worker, shared = Worker(rig, "w", 1), 4 * shared_pages
    for number in range(1 + bool(shared_pages)):
        ask(worker, number, [*range(shared), *range(1_000 * number, 1_000 * number + 4 * pages)])
    node = rig.core.books.forest.trees[ROOT].root
    while node.children:
        node = list(node.children.values())[-1]
    return node


@pytest.mark.parametrize("shared_pages", [0, 150])
def test_an_edge_that_leaves_bit_by_bit_is_hashed_once_and_then_a_block_each_time(
    monkeypatch: pytest.MonkeyPatch, shared_pages: int
) -> None:
    rig = Rig(2_000)
    node = long_edge(rig, 600, shared_pages)
    hashed: list[int] = []

    def counting(data: bytes, seed: int) -> int:
        hashed.append(len(data))
        return xxh3_64_intdigest(data, seed)

    monkeypatch.setattr(departed, "xxh3_64_intdigest", counting)
    rig.core.books.forest.trim(node, 3, Why.EVICTED)
    assert sum(hashed) <= 16 * (node.depth + 3 + 256)
    for _ in range(190):
        hashed.clear()
        rig.core.books.forest.trim(node, 3, Why.EVICTED)
        assert sum(hashed) <= 16 * (256 + 3)
    rig.core._waterfalls.check()


@pytest.mark.sources
def test_what_is_told_is_the_same_whatever_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waterfall, "mark_count_for", lambda _page_count: 1 << 22)  # few collide
    told = []
    for block_pages in (1, 3, 256):
        monkeypatch.setattr(departed, "_BLOCK_PAGES", block_pages)
        dice, rig = random.Random(7), Rig(48)
        worker, stems = Worker(rig, "w", 1), [[stem] * 60 for stem in range(3)]
        answers = []
        for number in range(300):
            stem = dice.choice(stems)[: 4 * dice.randrange(15)]
            prompt = [*stem, *(dice.randrange(2) for _ in range(dice.randrange(1, 60)))]
            answers.append(ask(worker, number, prompt).lost)
        told.append(answers)
    assert told[0] == told[1] == told[2]
    assert sum(bool(lost) for lost in told[0]) > 50, "hardly anything was said to be lost"


def test_blocks_of_few_edges_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departed, "_CHAINS_MAX", 2)
    monkeypatch.setattr(departed, "_BLOCK_PAGES", 2)
    rig = Rig(64)
    worker = Worker(rig, "w", 1)
    for number in range(5):
        ask(worker, number, [number] * 33)
    memory: Departed = rig.core._waterfalls._departed
    for node in list(rig.core.books.forest.trees[ROOT].root.children.values()):
        rig.core.books.forest.trim(node, 1, Why.EVICTED)
        assert len(memory._chains) <= 2
        memory.check()
    for node in list(memory._chains):
        rig.core.books.forest.trim(node, len(node.pages), Why.EVICTED)
    assert not memory._chains, "what is gone is forgotten"


def test_marks_take_a_share_of_what_tokens_do_in_pools_of_any_size() -> None:
    counts = {pages: mark_count_for(pages) for pages in (0, 75_000, 131_072, 10_000_000)}
    assert counts == {0: 1 << 12, 75_000: 1 << 15, 131_072: 1 << 16, 10_000_000: 1 << 16}


def test_a_run_of_more_pages_than_a_mark_can_say_is_told_as_far_as_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(departed, "_NOTED_PAGES_MAX", 8)
    rig = Rig(64)
    node, memory = long_edge(rig, 20), rig.core._waterfalls._departed
    memory.leaving(node, 20, Why.EVICTED)
    at_root = Match(node.parent, node.parent, 0, 0)
    assert memory.lost_pages(ROOT, node.tokens, at_root, 20) == [(Why.EVICTED, 8)]


@pytest.mark.sources
def test_a_mark_is_40_bits_of_the_hash_then_the_pages_of_the_run_and_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the uppermost bits of a digest are."""
    keys: list[int] = []

    def high(data: bytes, seed: int) -> int:
        digest: int = xxh3_64_intdigest(data, seed) | 0b1111 << 60
        keys.append(digest & (1 << 60) - 1)
        return digest

    monkeypatch.setattr(departed, "xxh3_64_intdigest", high)
    rig = Rig(64)
    node, memory = long_edge(rig, 20), rig.core._waterfalls._departed
    keys.clear()
    memory.leaving(node, 20, Why.QUOTA)
    assert len(keys) == 6, "after 1, 2, 4, 8, 16 and 20 pages"
    for key in keys:
        mark = memory._marks[key & (len(memory._marks) - 1)]
        assert (mark >> 20, mark >> 3 & 0x1FFFF, mark & 7) == (key >> 20, 20, 3)
    at_root = Match(node.parent, node.parent, 0, 0)
    assert memory.lost_pages(ROOT, node.tokens, at_root, 20) == [(Why.QUOTA, 20)]


def test_a_chain_of_short_edges_that_leaves_is_hashed_a_block_at_most_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(1_000)
    worker = Worker(rig, "w", 1)
    ids = list(range(4 * 600))
    for end in range(4, len(ids) + 1, 4):  # only who made an edge may lengthen it
        worker.release(worker.granted(end, ids[:end]), ids[:end])
    forest = rig.core.books.forest
    hashed: list[int] = []

    def counting(data: bytes, seed: int) -> int:
        hashed.append(len(data))
        return xxh3_64_intdigest(data, seed)

    monkeypatch.setattr(departed, "xxh3_64_intdigest", counting)
    [tree] = forest.trees.values()
    nodes = list(tree.root.below())
    assert len(nodes) > 500
    leaf = max(nodes, key=lambda node: node.depth)
    for number in range(500):
        hashed.clear()
        above = leaf.parent
        forest.trim(leaf, len(leaf.pages), Why.EVICTED)
        assert not number or sum(hashed) <= 16 * (256 + 3)
        leaf = above
    rig.core._waterfalls.check()
