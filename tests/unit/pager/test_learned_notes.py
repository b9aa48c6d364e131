"""What the learned eviction notes of idle edges is what they are, in whatever order they come."""

from __future__ import annotations

from hypothesis import given, settings
from tests.unit.pager.test_eviction import Cache, steps

from pagemesh.pager.eviction.learned import Learned
from pagemesh.pager.pages.runs import Run
from pagemesh.pager.tree.radix import Node


def idle_edges(cache: Cache) -> list[Node]:
    trees = cache.forest.trees.values()
    return [node for tree in trees for node in tree.root.below() if not node.pins]


def check(cache: Cache, policy: Learned) -> None:
    list(policy)  # works out what was put off
    for node in idle_edges(cache):
        note = node.note
        assert note.pages + note.has_tail == len(node.pages), "it waits for other pages"
    for level in policy._levels:
        queued = list[Node]()
        link = level.newer
        while isinstance(link, Node):
            queued.append(link)
            link = link.newer
        tailed = [one for one in queued if one.note.has_tail]
        assert level.tailed is (tailed[0] if tailed else None), "a tail is overlooked"


@settings(deadline=None, max_examples=150)
@given(steps)
def test_pages_and_tails_that_wait_are_those_that_are_there(
    steps: list[tuple[int, ...] | int | None],
) -> None:
    policy = Learned(24)
    cache = Cache(24, policy)
    for step in steps:
        cache.take(step)
        if cache.pool.idle:
            policy.victim()
        check(cache, policy)


def test_what_only_ends_is_counted_before_it_is_much() -> None:
    """As where an account loses a tree with many idle edges, and nothing is ever evicted."""
    policy = Learned(100_000)
    root = Cache(24, policy).forest.plant(b"another", 1).root
    edges = [Node(root, bytes([n % 256, n // 256, 0, 0]), Run(n, n + 1)) for n in range(2_000)]
    for edge in edges:
        policy.add(edge)
    policy.tidy()
    for edge in edges:
        policy.remove(edge)
    policy.tidy()
    model = policy._model
    assert len(model.entered) + len(model.ended) + len(model.lapsed) < 6_000
    assert not list(policy)
