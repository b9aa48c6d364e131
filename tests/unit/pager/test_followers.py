"""Which pages on disk come right after which, as pages come and go."""

from __future__ import annotations

from pagemesh.pager.tiers.followers import Followers


def test_a_page_that_nothing_follows_any_more_may_be_followed_again() -> None:
    followers = Followers()
    for _ in range(2):
        for chain in (2, 3):
            followers.add(1, chain)
        assert followers.of(1) == [2, 3]
        for chain in (2, 3):
            followers.remove(1, chain)
        assert 1 not in followers and followers.of(1) == []
