"""What a pager says of itself."""

from __future__ import annotations

from pathlib import Path

from pagemesh.pager.board import PagerBoard, PagerSettings
from pagemesh.pager.limits import PagerLimits
from pagemesh.wire.identity import secret_tag


def test_a_pager_says_which_secret_it_has_and_not_what_it_is(tmp_path: Path) -> None:
    secret = b"a secret of sixteen bytes or more"
    settings = PagerSettings(
        "a", "pager", 1, tmp_path, 1 << 20, secret, PagerLimits(), False, "lru"
    )  # fmt: skip
    said = PagerBoard(settings).announce()
    assert said.secret_tag == secret_tag(secret) != secret_tag(b"another " + secret)
    assert secret not in repr(said).encode()
