"""What a pager says of itself, and what it is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pagemesh.pager.board import PagerBoard, PagerSettings
from pagemesh.pager.limits import PagerLimits
from pagemesh.pager.service import settings_of
from pagemesh.runtime.service_config import load_service_config
from pagemesh.wire.identity import secret_tag


def test_a_pager_says_which_secret_it_has_and_not_what_it_is(tmp_path: Path) -> None:
    secret = b"a secret of sixteen bytes or more"
    settings = PagerSettings(
        "a", "pager", 1, tmp_path, 1 << 20, secret, PagerLimits(), False, "lru"
    )  # fmt: skip
    said = PagerBoard(settings).announce()
    assert said.secret_tag == secret_tag(secret) != secret_tag(b"another " + secret)
    assert secret not in repr(said).encode()


@pytest.mark.parametrize("name", ["DISK_BYTES", "DISK_STAGING_BYTES"])
def test_the_size_of_a_disk_tier_that_is_nowhere_is_told_of(name: str, tmp_path: Path) -> None:
    environ = {"PAGEMESH_SECRET": "0123456789abcdef", f"PAGEMESH_{name}": "1GiB"}
    for more, is_told in (
        ({}, True),
        ({"PAGEMESH_HOST_BYTES": "1MiB"}, name == "DISK_BYTES"),
        ({"PAGEMESH_DISK_DIR": str(tmp_path)}, False),
    ):
        with capture_logs() as logs:
            settings_of(load_service_config(environ, more))
        told = [log["why"] for log in logs if log["event"] == "pager.no_disk_folder"]
        assert bool(told) is is_told
        assert all(f"PAGEMESH_{name} (" in why for why in told)
