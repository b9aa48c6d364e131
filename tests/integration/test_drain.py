"""Ctrl-C of a mesh that serves: running requests finish; a second one does not wait."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest
from tests.integration.mesh import Mesh
from tests.integration.test_kill import OUTPUT_TOKENS, prompts_of, run_all

STOP_SECONDS_MAX = 8.0


@pytest.mark.slow
def test_running_streams_are_finished_before_the_mesh_stops(
    pool_dir: Path, tiny_model: Path
) -> None:
    with Mesh(pool_dir, model=tiny_model, pool_bytes=32 << 20, handover=True) as mesh:
        streams = asyncio.run(run_all(mesh, prompts_of(11), mesh.interrupt))
        assert [stream.finish for stream in streams] == ["length"] * len(streams)
        assert all(stream.done and len(stream.tokens) == OUTPUT_TOKENS for stream in streams)
        assert mesh.stop() == 0
        assert "stopping" in mesh.log and "did not stop" not in mesh.log
        assert "died" not in mesh.log
    assert list(pool_dir.iterdir()) == []


@pytest.mark.slow
def test_a_second_ctrl_c_cuts_off_what_runs(pool_dir: Path, tiny_model: Path) -> None:
    with Mesh(pool_dir, model=tiny_model, pool_bytes=32 << 20) as mesh:
        struck: list[float] = []

        def strike() -> None:
            mesh.interrupt()
            mesh.wait_for(lambda: "stopping" in mesh.log, "the first to be heard")
            mesh.interrupt()
            struck.append(time.monotonic())

        with pytest.raises(ExceptionGroup) as caught:
            asyncio.run(run_all(mesh, prompts_of(12), strike))
        assert caught.value.subgroup(httpx.HTTPError) is not None
        mesh.stop()
        assert time.monotonic() - struck[0] < STOP_SECONDS_MAX
        assert "stopping at once" in mesh.log
    assert list(pool_dir.iterdir()) == []
