"""What is remembered of keys changes how long a look-up takes, and nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagemesh.gateway.routing.key_memory import BLOCK_PAGES, KeyMemory
from pagemesh.gateway.routing.page_index import PageIndex
from pagemesh.wire.identity import prefix_keys
from pagemesh.wire.pager_reports import PagesChanged
from pagemesh.wire.tokens import U32

SECRET, ROOT, PAGE = b"s" * 16, b"r" * 32, 2
PAGES = 3 * BLOCK_PAGES


def prompt(pages: int, *, changed_at: int | None = None, rest: int = 0) -> U32:
    """Pages of tokens, the same for all but the page ``changed_at`` and what follows it."""
    ids = np.arange(pages * PAGE + rest, dtype="<u4")
    if changed_at is not None:
        ids[changed_at * PAGE :] += 1_000
    return ids


def index_of(keys: list[int]) -> PageIndex:
    index = PageIndex(keys_max=10_000)
    index.announced(1, 0)
    packed = np.array(keys, "<u8").tobytes()
    index.changed(PagesChanged(host="h", epoch=1, sequence=1, stored=packed, removed=b""))
    return index


def keys_of(tokens: U32) -> list[int]:
    return list(map(int, prefix_keys(SECRET, ROOT, tokens, PAGE)))


def leading(tokens: U32, index: PageIndex) -> int:
    count = 0
    for key in keys_of(tokens):
        if key not in index:
            break
        count += 1
    return count


PROMPTS = st.builds(
    prompt,
    st.integers(0, PAGES),
    changed_at=st.none() | st.integers(0, PAGES),
    rest=st.integers(0, PAGE - 1),
)


@given(
    asked=st.lists(PROMPTS, min_size=1, max_size=6),
    held=st.lists(st.tuples(st.integers(0, PAGES), st.sets(st.integers(0, PAGES - 1), max_size=3))),
)
def test_pages_are_counted_as_without_a_memory(
    asked: list[U32], held: list[tuple[int, set[int]]]
) -> None:
    every = keys_of(prompt(PAGES))
    hosts = {
        str(number): index_of([every[page] for page in range(pages) if page not in missing])
        for number, (pages, missing) in enumerate(held)
    }
    memory = KeyMemory(SECRET, token_count_max=2 * BLOCK_PAGES * PAGE)
    for tokens in asked * 2:
        wanted = {name: leading(tokens, index) for name, index in hosts.items()}
        assert memory.cached_pages(ROOT, tokens, PAGE, hosts) == wanted
        memory.check()


def test_a_prefix_that_is_cached_is_hashed_once() -> None:
    tokens = prompt(2 * BLOCK_PAGES)
    hosts = {"h": index_of(keys_of(tokens))}
    memory = KeyMemory(SECRET)
    assert memory.cached_pages(ROOT, tokens, PAGE, hosts) == {"h": 2 * BLOCK_PAGES}
    memory._secret = b"another, which would make other keys"
    assert memory.cached_pages(ROOT, tokens, PAGE, hosts) == {"h": 2 * BLOCK_PAGES}


def test_keys_that_were_used_last_are_kept() -> None:
    first, second, third = (prompt(BLOCK_PAGES, changed_at=at) for at in (None, 0, 1))
    hosts = {"h": index_of([*keys_of(first), *keys_of(second), *keys_of(third)])}
    memory = KeyMemory(SECRET, token_count_max=2 * BLOCK_PAGES * PAGE)

    def cached(tokens: U32) -> int:
        return memory.cached_pages(ROOT, tokens, PAGE, hosts)["h"]

    for tokens in (first, second, first, third):
        assert cached(tokens) == BLOCK_PAGES
    memory._secret = b"another, which would make other keys"
    assert [cached(tokens) for tokens in (first, third, second)] == [BLOCK_PAGES, BLOCK_PAGES, 0]
    memory.check()


def test_one_root_knows_nothing_of_anothers_keys() -> None:
    tokens = prompt(BLOCK_PAGES)
    hosts = {"h": index_of(keys_of(tokens))}
    memory = KeyMemory(SECRET)
    memory.cached_pages(ROOT, tokens, PAGE, hosts)
    assert memory.cached_pages(b"q" * 32, tokens, PAGE, hosts) == {"h": 0}
