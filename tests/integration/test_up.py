"""``pagemesh up`` with real processes: starts, stops, restarts, and what it says when wrong."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest
from rich.console import Console
from tests.integration.mesh import Mesh, error_line, service_name
from tests.support.leaks import descendants

from pagemesh.cli.mesh import readiness
from pagemesh.cli.mesh.children import ChildSpec
from pagemesh.cli.mesh.plan_mesh import NatsServer as PlannedNats
from pagemesh.cli.mesh.screen import Screen
from pagemesh.runtime.bus import Bus
from pagemesh.runtime.config import Secret
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.service_config import load_service_config
from pagemesh.wire import codec, subjects
from pagemesh.wire.presence import Announce

MODEL = "tiny"
PROMPT = "one two three four five six seven eight nine ten " * 4


def complete(mesh: Mesh, prompt: str = PROMPT, max_tokens: int = 8) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=60.0)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_no_file_and_a_second_start_is_quick(
    pool_dir: Path, tiny_model: Path
) -> None:
    with Mesh(pool_dir, model=tiny_model, prefill=1, decode=2) as mesh:
        assert sorted(mesh.pids()) == [
            "decode-0", "decode-1", "gateway", "nats", "pager", "prefill-0",
        ]  # fmt: skip
        text_of(complete(mesh))
        started = list(mesh.pids().values())
        assert mesh.left_files()
        assert mesh.stop(signal.SIGINT) == 0
        assert not any(psutil.pid_exists(pid) for pid in started)
    assert list(pool_dir.iterdir()) == []
    assert "did not stop" not in mesh.log
    with Mesh(pool_dir, model=tiny_model) as again:
        assert again.start_seconds < 15.0
        assert again.stop(signal.SIGTERM) == 0
    assert list(pool_dir.iterdir()) == []


@pytest.mark.slow
def test_every_service_may_be_killed_and_comes_back(pool_dir: Path, tiny_model: Path) -> None:
    with Mesh(pool_dir, model=tiny_model, deterministic=True) as mesh:
        before, epoch = text_of(complete(mesh)), mesh.report().epoch
        for role in ("gateway", "decode", "prefill", "pager", "nats"):
            old = mesh.kill(role)
            mesh.wait_for(lambda role=role, old=old: mesh.pid(role) != old, f"a new {role}")  # type: ignore[misc]
            mesh.wait_ready()
            assert text_of(complete(mesh)) == before, f"after kill -9 of {role}"
            name = service_name(role)
            told = lambda name=name: mesh.log.rpartition(f"{name}: died (SIGKILL)")[2]  # noqa: E731
            mesh.wait_for(lambda told=told, name=name: f"{name}: ready" in told(), "a word of it")  # type: ignore[misc]
        report = mesh.wait_idle()
        assert report.epoch == epoch + 1, "the pager was restarted once"


@pytest.mark.slow
def test_after_kill_9_of_up_no_process_stays_and_the_next_start_adopts_the_pool(
    pool_dir: Path, tiny_model: Path
) -> None:
    mesh = Mesh(pool_dir, model=tiny_model)
    with mesh:
        text_of(complete(mesh))
        children = list(mesh.pids().values())
        mesh.kill_up()
        gone = lambda: not any(psutil.pid_exists(pid) for pid in children)  # noqa: E731
        mesh.wait_for(gone, "the children to follow", 10.0)
        assert mesh.left_files(), "kill -9 leaves the pool, that is what it is adopted for"
        mesh.start()
        assert "adopted" in mesh.log
        usage = complete(mesh).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert list(pool_dir.iterdir()) == []


@pytest.mark.slow
def test_two_meshes_live_side_by_side(pool_dir: Path, tiny_model: Path) -> None:
    with Mesh(pool_dir, model=tiny_model) as one, Mesh(pool_dir, model=tiny_model) as two:
        assert one.url != two.url
        text_of(complete(one))
        text_of(complete(two))


def answer_for_the_gateway(
    monkeypatch: pytest.MonkeyPatch, is_up: asyncio.Event | None = None
) -> None:
    """Its door says that it is ready: always, or once ``is_up`` is set."""

    async def answer(*_: object) -> bool:
        return is_up is None or is_up.is_set()

    monkeypatch.setattr(readiness, "_is_up", answer)


def shown_screen() -> tuple[Screen, io.StringIO]:
    """One without a terminal, and what it shows."""
    shown = io.StringIO()
    return Screen(Console(file=shown, width=200)), shown


async def test_a_nats_server_of_its_own_may_take_as_long_to_start_as_the_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_for_the_gateway(monkeypatch)
    screen, shown = shown_screen()
    config = load_service_config({"PAGEMESH_NATS_START_WAIT_MS": "100"})
    server = NatsServer(tmp_path)
    spec = ChildSpec("nats", "nats", 0, (), {})
    own = PlannedNats(server.url, {"operator": Secret()}, spec)
    members = readiness.Members([], config, own)
    ready = asyncio.create_task(readiness.become_ready(members, screen, timeout_ms=20_000))
    await asyncio.sleep(0.5)
    await asyncio.to_thread(server.start)
    try:
        await ready
    finally:
        server.stop()
    assert shown.getvalue() == "nats: ready\n"


async def test_a_nats_server_that_dies_while_others_are_waited_for_is_shown_as_ready_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway_is_up = asyncio.Event()
    answer_for_the_gateway(monkeypatch, gateway_is_up)
    screen, shown = shown_screen()
    server = NatsServer(tmp_path)
    own = PlannedNats(server.url, {"operator": Secret()}, ChildSpec("nats", "nats", 0, (), {}))
    members = readiness.Members([], load_service_config({}), own)
    await asyncio.to_thread(server.start)
    try:
        ready = asyncio.create_task(readiness.become_ready(members, screen, timeout_ms=20_000))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(server.stop)
        screen.change("nats", "died (SIGKILL)")
        await asyncio.to_thread(server.start)
        screen.change("nats", "started")
        gateway_is_up.set()
        await ready
    finally:
        server.stop()
    assert shown.getvalue().splitlines() == [
        "nats: ready", "nats: died (SIGKILL)", "nats: started", "nats: ready",
    ]  # fmt: skip


async def test_services_of_other_meshes_at_the_server_are_not_shown_as_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, shown = shown_screen()
    async with _waiting_for_ours(tmp_path, monkeypatch, screen) as (ready, bus):
        while not ready.done():
            _say_ready(bus, "theirs", 1)
            _say_ready(bus, "ours", 2)
            await asyncio.sleep(0.05)
    assert shown.getvalue() == "ours: ready\n"


async def test_a_mesh_is_not_ready_while_one_that_was_ready_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway_is_up = asyncio.Event()
    screen = Screen(Console(file=io.StringIO()))
    async with _waiting_for_ours(tmp_path, monkeypatch, screen, gateway_is_up) as (ready, bus):
        while not screen.shows("ours", "ready"):
            _say_ready(bus, "ours", 1)
            await asyncio.sleep(0.05)
        screen.change("ours", "died (SIGKILL)")
        gateway_is_up.set()
        await asyncio.sleep(0.5)
        assert not ready.done()
        screen.change("ours", "started")
        _say_ready(bus, "ours", 2)
        await ready


async def test_who_was_started_again_is_shown_as_ready_and_nobody_listens_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_for_the_gateway(monkeypatch)
    screen, shown = shown_screen()
    screen.change("ours", "ready")
    with NatsServer(tmp_path) as server:
        config = load_service_config({"PAGEMESH_NATS": server.url})
        members = readiness.Members(["ours"], config, None)
        following = asyncio.create_task(readiness.tell_of_returns(members, screen))
        async with Bus.connect(config.bus, role="pager", name="ours") as bus:
            asked: list[object] = []
            await bus.subscribe(subjects.ASK_PRESENCE, asked.append)
            for incarnation in (2, 3):
                await asyncio.sleep(0.3)
                assert not asked
                for state in ("died (SIGKILL)", "started"):
                    screen.change("ours", state)
                members.started.set()
                while not screen.shows("ours", "ready"):
                    _say_ready(bus, "ours", incarnation)
                    await asyncio.sleep(0.05)
                await asyncio.sleep(0.3)
                assert asked
                asked.clear()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    life = ["ours: died (SIGKILL)", "ours: started", "ours: ready"]
    assert shown.getvalue().splitlines() == ["ours: ready", *life, *life]


@contextlib.asynccontextmanager
async def _waiting_for_ours(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    screen: Screen,
    gateway_is_up: asyncio.Event | None = None,
) -> AsyncIterator[tuple[asyncio.Task[None], Bus]]:
    """`up` waits for the service ``ours``, at a server that others use too."""

    answer_for_the_gateway(monkeypatch, gateway_is_up)
    with NatsServer(folder) as server:
        config = load_service_config({"PAGEMESH_NATS": server.url})
        members = readiness.Members(["ours"], config, None)
        async with Bus.connect(config.bus, role="pager", name="theirs") as bus:
            waiting = readiness.become_ready(members, screen, timeout_ms=20_000)
            ready = asyncio.create_task(waiting)
            yield ready, bus
            await ready


def _say_ready(bus: Bus, name: str, incarnation: int) -> None:
    said = Announce(role="pager", name=name, incarnation=incarnation, host="h", state="ready")
    bus.publish(subjects.PRESENCE, codec.encode(said))


# --- what is wrong is one line, exit code 2, and nothing left running


@pytest.fixture
def environ(pool_dir: Path, tiny_model: Path) -> dict[str, str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("PAGEMESH_")}
    return clean | {
        "PAGEMESH_POOL_DIR": str(pool_dir),
        "PAGEMESH_POOL_BYTES": str(8 << 20),
        "PAGEMESH_MODEL": str(tiny_model),
        "PAGEMESH_HTTP": "127.0.0.1:0",
    }


def check_refused(arguments: list[str], environ: dict[str, str], *named: str) -> None:
    before = set(descendants(os.getpid()))
    code, line = error_line(arguments, environ)
    assert code == 2, line
    for text in named:
        assert text in line
    assert set(descendants(os.getpid())) <= before
    assert list(Path(environ["PAGEMESH_POOL_DIR"]).iterdir()) == []


def test_an_unreachable_nats_server_is_named(environ: dict[str, str]) -> None:
    flags = ["up", "--nats", "nats://127.0.0.1:1", "--nats-start-wait-ms", "300"]
    said = "no NATS server at nats://127.0.0.1:1 in 0.3 s: connection refused; start one there"
    on = "or name another with PAGEMESH_NATS (--nats); `pagemesh up` without it starts its own"
    check_refused(flags, environ, said, on)


def test_an_occupied_port_is_named(environ: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        check_refused(["up", "--http", address], environ, address, "--http")


@pytest.mark.slow
def test_a_pool_too_small_for_a_page_is_named(environ: dict[str, str]) -> None:
    flags = ["--pool-bytes", "65536", "--page-size", "256"]
    check_refused(["up", *flags], environ, "PAGEMESH_POOL_BYTES")


@pytest.mark.slow
def test_an_unsupported_architecture_is_named(environ: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "mystery"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LM"]}')
    for name in ("tokenizer.json", "tokenizer_config.json"):
        source = Path(environ["PAGEMESH_MODEL"]) / name
        (folder / name).write_bytes(source.read_bytes())
    flags = ["--model", str(folder)]
    check_refused(["up", *flags], environ, "GPT2LM", "decoders that generate text are")


@pytest.mark.slow
def test_a_broken_model_folder_is_named(environ: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text("{not json")
    check_refused(["up", "--model", str(folder)], environ, "broken")


def test_a_service_without_a_secret_says_how_to_make_one(environ: dict[str, str]) -> None:
    del environ["PAGEMESH_HTTP"]  # which is for `up`
    check_refused(["serve", "gateway"], environ, "PAGEMESH_SECRET")
