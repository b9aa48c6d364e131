"""``pagemesh bench`` against a mesh of real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from tests.integration.mesh import Mesh
from tests.support.interrupts import hear_interrupts


def start(mesh: Mesh, *arguments: str) -> subprocess.Popen[str]:
    environ = {name: text for name, text in os.environ.items() if not name.startswith("PAGEMESH_")}
    command = [sys.executable, "-m", "pagemesh.cli", "bench", "--url", mesh.url, *arguments]
    return subprocess.Popen(
        command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=hear_interrupts,
    )  # fmt: skip


@pytest.mark.slow
def test_a_mesh_is_asked_what_was_said_and_what_came_is_told(
    pool_dir: Path, tiny_model: Path
) -> None:
    with Mesh(pool_dir, model=tiny_model) as mesh:
        said = ["--requests", "6", "--concurrency", "2", "--input-tokens", "80", "--seed", "5"]
        said += ["--output-tokens", "12", "--json"]
        for cached_tokens in (0, 6 * 64):  # a seed that was used before is cached
            out, err = (asking := start(mesh, *said)).communicate(timeout=60)
            assert asking.returncode == 0, err
            told = json.loads(out)
            assert (told["answered"], told["prompt_tokens"]) == (6, 480)
            assert told["cached_tokens"] == cached_tokens
        out, _ = start(
            mesh, "--requests", "3", "--rate", "30", "--shared-tokens", "64"
        ).communicate()
        assert "3 requests, 30 a second, 512 tokens in (64 in common), 128 out" in out

        out, err = (
            asking := start(mesh, "--input-tokens", "100000", "--requests", "2")
        ).communicate()
        assert asking.returncode == 1 and "2 of 2 requests failed" in out, err
        assert "maximum context length" in out

        asking = start(mesh, "--requests", "100000")
        time.sleep(4)
        asking.send_signal(signal.SIGINT)
        out, err = asking.communicate(timeout=30)
        assert asking.returncode == 130 and "stopped after" in out, err
        assert "first text, ms" in out
        assert httpx.get(f"{mesh.url}/health/ready").status_code == 200
