"""The prompts and tenants of the machines."""

from __future__ import annotations

from hypothesis import strategies as st

from pagemesh.wire.cache_terms import CacheTerms

ROOTS = (b"a" * 32, b"b" * 32)
USUAL = (CacheTerms(), CacheTerms(tenant="b", pages_max=7, disk_pages_max=4))
"""The terms of the two roots: the second one's tenant may use seven of the twelve pages, and four
of those on disk."""
TENANCIES = [
    USUAL,
    (USUAL[0], CacheTerms(tenant="b", pages_max=5, disk_pages_max=2)),
    (USUAL[0], CacheTerms(tenant="b")),
    (USUAL[1], USUAL[1]),
    (USUAL[0], CacheTerms(tenant="c", pages_max=6)),
    (CacheTerms(tenant="c", pages_max=6), USUAL[1]),
]
"""Terms of the roots according to gateways that were started with other limits."""
masks = st.sampled_from([0, 0, 0, 0, 1, 2, 4, 7])
"""Bit masks of the workers that are silent."""
picks = st.integers(0, 1 << 16)
"""An index into a collection, modulo its size at the time."""
pages = st.sampled_from([(0, 0, 0, 0), (0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1)])
tails = st.lists(st.integers(0, 1), min_size=1, max_size=3)
prompts = st.tuples(st.lists(pages, max_size=3), tails).map(
    lambda parts: [token for page in parts[0] for token in page] + parts[1]
)
"""Prompts of few different pages, so that most have been cached before."""
