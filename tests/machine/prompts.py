"""What the workers of the machines are asked, and who is."""

from __future__ import annotations

from hypothesis import strategies as st

from pagemesh.wire.cache_terms import CacheTerms

ROOTS = (b"a" * 32, b"b" * 32)
USUAL = (CacheTerms(), CacheTerms(tenant="b", pages_max=7, disk_pages_max=4))
"""Whose the roots are: the second one's tenant may use seven of the twelve pages, and four of those
on disk."""
TENANCIES = [
    USUAL,
    (USUAL[0], CacheTerms(tenant="b", pages_max=5, disk_pages_max=2)),
    (USUAL[0], CacheTerms(tenant="b")),
    (USUAL[1], USUAL[1]),
    (USUAL[0], CacheTerms(tenant="c", pages_max=6)),
    (CacheTerms(tenant="c", pages_max=6), USUAL[1]),
]
"""Whose they are by what gateways say that were started with other limits."""
masks = st.sampled_from([0, 0, 0, 0, 1, 2, 4, 7])
"""Of workers, who is silent."""
picks = st.integers(0, 1 << 16)
"""One of as many as there are then."""
pages = st.sampled_from([(0, 0, 0, 0), (0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1)])
tails = st.lists(st.integers(0, 1), min_size=1, max_size=3)
prompts = st.tuples(st.lists(pages, max_size=3), tails).map(
    lambda parts: [token for page in parts[0] for token in page] + parts[1]
)
"""Of few different pages, so that what is asked for was cached before more often than not."""
