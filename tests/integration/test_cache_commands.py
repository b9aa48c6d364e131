"""``pagemesh cache`` and ``pagemesh audit`` against a mesh of real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from tests.integration.mesh import Mesh

from pagemesh.cli.audit import audit
from pagemesh.wire.pager_reports import LeaseLine

PROMPT = [index * 7 % 256 for index in range(256)]
TRACE = "5b8aa5a2d2c872e8321cf37308d69df2"


def pagemesh(mesh: Mesh, *arguments: str, code: int = 0) -> str:
    """What the command prints (on both streams); it exits with ``code``."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("PAGEMESH_")}
    done = subprocess.run(
        [sys.executable, "-m", "pagemesh.cli", *arguments],
        env=environ | {"PAGEMESH_POOL_DIR": str(mesh.pool_dir)},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    return done.stdout


def entries(mesh: Mesh, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(pagemesh(mesh, *arguments, "--json"))
    return found


def cached(mesh: Mesh, prompt: list[int]) -> int:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


@pytest.mark.slow
def test_operators_see_pin_and_invalidate_what_is_cached(pool_dir: Path, tiny_model: Path) -> None:
    with Mesh(pool_dir, model=tiny_model) as mesh:
        assert (cached(mesh, PROMPT), cached(mesh, PROMPT)) == (0, 240)
        [stats] = entries(mesh, "cache", "stats")
        assert stats["idle_pages"] >= 16 and stats["cached_tokens"] == 240
        assert "16 tokens" in pagemesh(mesh, "cache", "stats")
        [tree] = entries(mesh, "cache", "tree")
        root = tree["lines"][0]["root"]
        assert root[:12] in pagemesh(mesh, "cache", "tree")
        [top] = entries(mesh, "cache", "top")
        assert top["lines"][0]["uses"] == 1

        tokens = ",".join(map(str, PROMPT))
        [pin] = entries(mesh, "cache", "pin", "--root", root, "--tokens", tokens)
        assert pin["pages"] == 16
        [freed] = entries(mesh, "cache", "invalidate", "--idle")
        assert freed["roots"] == [] and cached(mesh, PROMPT) == 240, "what is pinned stays"
        assert pin["pin"] in pagemesh(mesh, "cache", "unpin", pin["pin"])
        assert "nothing is pinned" in pagemesh(mesh, "cache", "unpin", pin["pin"], code=1)

        [retired] = entries(mesh, "cache", "invalidate", "--model", "tiny")
        assert (retired["roots"], retired["unknown_root_count"]) == ([root], 0)
        assert cached(mesh, PROMPT) == 0
        mesh.kill("pager")
        assert cached(mesh, PROMPT) == 240, "what was computed since is warm"


@pytest.mark.slow
def test_a_pin_stands_when_the_pager_was_killed_and_ends_when_it_is_unpinned(
    pool_dir: Path, tiny_model: Path
) -> None:
    with Mesh(pool_dir, model=tiny_model) as mesh:
        cached(mesh, PROMPT)
        [tree] = entries(mesh, "cache", "tree")
        where = ("--root", tree["lines"][0]["root"], "--tokens", ",".join(map(str, PROMPT)))
        [pin] = entries(mesh, "cache", "pin", *where, "--ttl-s", "600")
        mesh.kill("pager")
        assert cached(mesh, PROMPT) == 240
        [stats] = entries(mesh, "cache", "stats")
        [line] = stats["pins"]
        assert (line["pin"], line["pages"]) == (pin["pin"], 16)
        assert 500 < line["expires_in_s"] <= 600
        entries(mesh, "cache", "invalidate", "--idle")
        assert cached(mesh, PROMPT) == 240, "what is pinned stays"
        entries(mesh, "cache", "unpin", "--all")
        mesh.kill("pager")
        assert cached(mesh, PROMPT) == 240
        [stats] = entries(mesh, "cache", "stats")
        assert stats["pins"] == []


@pytest.mark.slow
def test_a_prefix_is_pinned_as_text_or_as_chat(pool_dir: Path, tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "You are a patient teacher. " * 8}]
    file = tmp_path / "talk.json"
    file.write_text(json.dumps(talk))
    with Mesh(pool_dir, pool_bytes=64 << 20) as mesh:
        asked = {"model": "pagemesh-demo", "max_tokens": 2}
        body = asked | {"messages": [*talk, {"role": "user", "content": "Hello."}]}
        answer = httpx.post(f"{mesh.url}/v1/chat/completions", json=body, timeout=60.0)
        assert answer.status_code == 200
        httpx.post(
            f"{mesh.url}/v1/completions", json=asked | {"prompt": "word " * 64}, timeout=60.0
        )
        url = ("--url", mesh.url)
        [chat] = entries(mesh, "cache", "pin", "--messages", str(file), *url)
        [text] = entries(mesh, "cache", "pin", "--text", "word " * 64, "--ttl-s", "600", *url)
        assert chat["pages"] > 0 and text["pages"] > 0 and text["expires_in_s"] == 600
        assert "NATS" not in pagemesh(mesh, "cache", "pin", "--text", "short", *url, code=1)


@pytest.mark.slow
def test_an_audit_finds_nothing_in_a_busy_mesh_and_names_a_frozen_worker_as_silent(
    pool_dir: Path, tiny_model: Path
) -> None:
    with Mesh(pool_dir, model=tiny_model, flags=("--silence-ms-max", "60000")) as mesh:
        stop = threading.Event()

        def keep_asking() -> None:
            while not stop.is_set():
                cached(mesh, PROMPT)

        asking = threading.Thread(target=keep_asking)
        asking.start()
        try:
            summary, verdict = pagemesh(mesh, "audit").splitlines()
            assert "2 workers" in summary and verdict == "all of it adds up"
        finally:
            stop.set()
            asking.join()
        [frozen] = [name for name in mesh.report().workers if name.startswith("decode")]
        pid = mesh.pid("decode")
        os.kill(pid, signal.SIGSTOP)
        try:
            told = json.loads(pagemesh(mesh, "audit", "--json"))
            assert [host["silent"] for host in told["hosts"]] == [[frozen]]
            assert told["findings"] == [], "its pages are its own until it is dead"
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_an_audit_names_owner_request_and_trace_of_what_a_dead_worker_still_holds(
    pool_dir: Path, tiny_model: Path
) -> None:
    """Its session lasts some seconds more. The audit runs in this process, since a command may take
    as long to start."""
    body = {
        "model": "tiny", "prompt": PROMPT, "max_tokens": 1_700, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    headers = {"traceparent": f"00-{TRACE}-5fb397be34d26b51-01"}
    env = {"PAGEMESH_STREAM_MS": "0"}  # the first token comes by itself, long before the end
    with Mesh(pool_dir, model=tiny_model, env=env) as mesh:
        arguments = ["--nats", mesh.nats_url("operator")]
        pids = mesh.pids()
        others = [mesh.up_pid, pids["gateway"]]
        workers = {name: pids[name] for name in ("prefill-0", "decode-0")}
        leases: list[LeaseLine] = []
        try:
            for _ in range(5):  # an answer takes half a second, for which this process may be away
                with httpx.stream(
                    "POST", f"{mesh.url}/v1/completions", json=body, headers=headers, timeout=60.0
                ) as answer:
                    assert next(answer.iter_lines())
                    for pid in (*workers.values(), *others):
                        os.kill(pid, signal.SIGSTOP)
                if leases := mesh.report().leases:
                    break
                for pid in (*workers.values(), *others):
                    os.kill(pid, signal.SIGCONT)
            [held] = leases
            os.kill(workers.pop(held.owner), signal.SIGKILL)
            for pid in workers.values():
                os.kill(pid, signal.SIGCONT)
            done = CliRunner().invoke(audit, arguments, standalone_mode=False)
        finally:  # they would have sent it to the next one, and started another
            for pid in others:
                os.kill(pid, signal.SIGCONT)
        lines = [line for line in done.output.splitlines() if "its holder is not there" in line]
        assert done.return_value == 1 and len(lines) == 1, done.output
        named = f"lease {held.lease:x} of {held.owner}; request {held.key.request}, trace {TRACE}; "
        assert named in lines[0]


def test_a_command_without_a_mesh_says_what_to_do_in_one_line(pool_dir: Path) -> None:
    environ = {name: text for name, text in os.environ.items() if not name.startswith("PAGEMESH_")}
    done = subprocess.run(
        [sys.executable, "-m", "pagemesh.cli", "cache", "stats", "--nats", "nats://127.0.0.1:9"],
        env=environ | {"PAGEMESH_POOL_DIR": str(pool_dir), "PAGEMESH_NATS_START_WAIT_MS": "300"},
        text=True, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode in (1, 2) and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
