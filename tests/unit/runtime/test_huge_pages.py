"""Objects stay what they are when their memory moves to huge pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pagemesh.runtime.huge_pages import HUGE_PAGE_COUNT_MAX, SETTING, gather

_LOADED = """
import re
from pathlib import Path
from pagemesh.runtime import huge_pages

def huge_kib():
    return int(re.search(r"AnonHugePages: *(\\d+)", Path("/proc/self/smaps_rollup").read_text())[1])

loaded = [(index, str(index)) for index in range(200_000)]
before = huge_kib()
count = huge_pages.gather(loaded)
assert loaded == [(index, str(index)) for index in range(200_000)]
print(count, huge_kib() - before)
"""


def test_what_is_loaded_lies_on_huge_pages_and_is_what_it_was() -> None:
    if not SETTING.exists() or "[never]" in SETTING.read_text():
        pytest.skip("this system has no huge pages for processes")
    done = subprocess.run(
        [sys.executable, "-c", _LOADED], capture_output=True, text=True, check=True
    )
    count, kib = map(int, done.stdout.split())
    if not count:
        pytest.skip("this kernel does not collapse pages when asked, or has none free")
    assert count <= HUGE_PAGE_COUNT_MAX
    assert kib >= count * 1_024  # the system may have taken some for itself again


def test_a_system_that_has_none_is_not_asked(tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    loaded = [(index,) for index in range(50_000)]
    assert gather(loaded, setting=setting) == 0
    setting.write_text("always madvise [never]\n")
    assert gather(loaded, setting=setting) == 0
