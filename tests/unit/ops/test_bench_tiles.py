"""The comparison with matrix tiles is skipped where a processor has none."""

from __future__ import annotations

from pathlib import Path

import pytest
from ops.bench import bench_tiles

from pagemesh.kernels.native.library import CpuLevel


def test_a_machine_without_tiles_says_so_in_a_line_and_fails_no_other_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "tiles.json"
    monkeypatch.setattr(bench_tiles, "cpu_level", lambda: CpuLevel.AVX512_BF16)
    monkeypatch.setattr("sys.argv", ["bench_tiles", "--out", str(out)])
    assert bench_tiles.main() == 0
    told = capsys.readouterr().out
    assert told == "no matrix tiles at level avx512_bf16: nothing is measured\n"
    assert not out.exists()
