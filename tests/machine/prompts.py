"""What the workers of the machines are asked, and who is."""

from __future__ import annotations

from hypothesis import strategies as st

picks = st.integers(0, 1 << 16)
"""One of as many as there are then."""
pages = st.sampled_from([(0, 0, 0, 0), (0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1)])
tails = st.lists(st.integers(0, 1), min_size=1, max_size=3)
prompts = st.tuples(st.lists(pages, max_size=3), tails).map(
    lambda parts: [token for page in parts[0] for token in page] + parts[1]
)
"""Of few different pages, so that what is asked for was cached before more often than not."""
