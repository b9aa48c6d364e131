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
def test_who_waits_when_a_mesh_is_given_up_is_told_so(pool_dir: Path, tiny_model: Path) -> None:
    """What cannot go on without the pager would wait for it; the mesh was killed around it."""
    once = {"PAGEMESH_EXIT_COUNT_MAX": "1"}
    with Mesh(pool_dir, model=tiny_model, pool_bytes=32 << 20, env=once) as mesh:
        ask = {"prompt": "to be", "max_tokens": 1_900, "ignore_eos": True, "n": 16}

        async def asked(stream: bool) -> httpx.Response:
            async with httpx.AsyncClient(base_url=mesh.url, timeout=30.0) as client:
                return await client.post("/v1/completions", json=ask | {"stream": stream})

        async def all_asked() -> list[httpx.Response]:
            asking = [asyncio.create_task(asked(stream)) for stream in (True, False) * 2]
            await asyncio.sleep(0.5)
            await asyncio.to_thread(mesh.kill, "pager")
            return await asyncio.gather(*asking)

        answers = asyncio.run(all_asked())
        assert mesh.stop() == 1
        for stream, whole in (answers[:2], answers[2:]):
            assert stream.status_code == 200
            assert '"code":"stopped"' in stream.text.splitlines()[-2], stream.text[-500:]
            assert (whole.status_code, whole.json()["error"]["code"]) == (503, "stopped")
        assert "gateway: did not stop" not in mesh.log
        given_up, error = "pager: given up after 1 death", "error: pager died once"
        assert 0 < mesh.log.index(given_up) < mesh.log.index("cut_off") < mesh.log.index(error)
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
