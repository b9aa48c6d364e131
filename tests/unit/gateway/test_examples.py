"""The example clients, run as a user would run them."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import nats
import pytest
from nats.aio.msg import Msg
from tests.unit.gateway.fake_mesh import FakeMesh

from pagemesh.runtime.nats_server import NatsServer

EXAMPLES = Path(__file__).resolve().parents[3] / "ops" / "examples"
QUESTION = "what is said"


async def run(*command: str, folder: Path | None = None) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(90):
            out, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    return process.returncode or 0, out.decode(), errors.decode()


def answers(mesh: FakeMesh, text: str) -> None:
    """Have the mesh answer anything with ``text``."""
    tokens = mesh.front.tokens
    ids = tokens.encode(text, add_special_tokens=False).tolist()
    ids += sorted(tokens.end_tokens)
    mesh.worker.speech = lambda _prompt: ids
    mesh.worker.cached_tokens = 2


async def test_the_python_client_chats_over_nats(
    mesh: FakeMesh, shared_nats_server: NatsServer
) -> None:
    answers(mesh, "hello, bus")
    script = str(EXAMPLES / "python" / "nats_client.py")
    code, out, errors = await run(
        sys.executable, script, "--nats", shared_nats_server.url, QUESTION
    )
    assert (code, errors) == (0, "")
    assert out.startswith("hello, bus\n[") and "2 cached" in out


async def test_the_python_client_tells_an_error_over_nats(
    mesh: FakeMesh, shared_nats_server: NatsServer
) -> None:
    script = str(EXAMPLES / "python" / "nats_client.py")
    code, _, errors = await run(
        sys.executable, script, "--nats", shared_nats_server.url, "--model", "other", QUESTION
    )
    assert code == 1 and "does not exist" in errors


async def test_the_python_client_tells_in_one_line_that_no_model_is_named_to_it(
    shared_nats_server: NatsServer,
) -> None:
    script = str(EXAMPLES / "python" / "nats_client.py")
    command = (sys.executable, script, "--nats", shared_nats_server.url, QUESTION)
    assert await run(*command) == (1, "", "no gateway listens\n")
    client = await nats.connect(shared_nats_server.url)
    try:
        frozen = await client.subscribe("pagemesh.v1.models")
        code, out, errors = await run(*command)
        assert (code, out) == (1, "")
        assert errors.startswith("no answer: ") and "timeout" in errors
        await frozen.unsubscribe()

        async def refuse(message: Msg) -> None:
            assert message.reply
            body, headers = b'{"error": {"message": "no such key"}}', {"pagemesh-error": "Denied"}
            await client.publish(message.reply, body, headers=headers)

        await client.subscribe("pagemesh.v1.models", cb=refuse)
        assert await run(*command) == (1, "", "no such key\n")
    finally:
        await client.close()


async def test_the_python_clients_tell_in_one_line_that_nobody_is_there() -> None:
    script = str(EXAMPLES / "python" / "nats_client.py")
    code, out, errors = await run(
        sys.executable, script, "--nats", "nats://u:pw@127.0.0.1:1", QUESTION
    )
    assert (code, out) == (1, "") and errors.startswith("cannot reach NATS at 127.0.0.1:1: ")
    assert len(errors.splitlines()) == 1 and "PAGEMESH_NATS" in errors and "pw" not in errors
    script = str(EXAMPLES / "python" / "openai_client.py")
    code, out, errors = await run(sys.executable, script, "--url", "http://127.0.0.1:1", QUESTION)
    assert (code, out) == (1, "") and errors.startswith("no answer from http://127.0.0.1:1; ")
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("scheme", ["", "nats://"])
async def test_the_python_client_names_the_server_that_it_cannot_reach(scheme: str) -> None:
    script = str(EXAMPLES / "python" / "nats_client.py")
    for server in ("127.0.0.1:1", "[::1"):
        code, out, errors = await run(
            sys.executable, script, "--nats", f"{scheme}u:pw@{server}", QUESTION
        )
        assert (code, out) == (1, "") and errors.startswith(f"cannot reach NATS at {server}: ")
        assert len(errors.splitlines()) == 1 and "pw" not in errors


@pytest.mark.parametrize("end", ["", "/v1", "/v1/"])
async def test_the_python_client_chats_over_http(mesh: FakeMesh, end: str) -> None:
    answers(mesh, "hello, web")
    script = str(EXAMPLES / "python" / "openai_client.py")
    code, out, errors = await run(sys.executable, script, "--url", mesh.url + end, QUESTION)
    assert (code, errors) == (0, "")
    assert out.startswith("hello, web\n[") and "2 cached" in out


@pytest.fixture(scope="module")
def javascript(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example in JavaScript, with what it needs."""
    folder = tmp_path_factory.mktemp("example") / "javascript"
    shutil.copytree(EXAMPLES / "javascript", folder, ignore=shutil.ignore_patterns("node_modules"))
    command = ("npm", "install", "--no-audit", "--no-fund", "--no-package-lock")
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


with_javascript = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")


@pytest.mark.slow
@pytest.mark.timeout(300)
@with_javascript
async def test_the_javascript_client_chats_over_nats(
    mesh: FakeMesh, shared_nats_server: NatsServer, javascript: Path
) -> None:
    answers(mesh, "hello, script")
    command = ("node", "nats_client.mjs", "--nats", shared_nats_server.url)
    code, out, errors = await run(*command, QUESTION, folder=javascript)
    assert (code, errors) == (0, "")
    assert out.startswith("hello, script\n[") and "2 cached" in out
    code, _, errors = await run(*command, "--model", "other", QUESTION, folder=javascript)
    assert code == 1 and "does not exist" in errors
    command = ("node", "nats_client.mjs", "--nats", "nats://u:pw@127.0.0.1:1")
    code, _, errors = await run(*command, QUESTION, folder=javascript)
    assert code == 1 and errors.startswith("cannot reach NATS at 127.0.0.1:1: ")
    assert len(errors.splitlines()) == 1 and "pw" not in errors
    for wrong in (("--max-token", "9"), ("--max-tokens", "many")):
        code, out, errors = await run(*command, *wrong, QUESTION, folder=javascript)
        assert (code, out) == (2, "") and errors.startswith("usage: node nats_client.mjs ")
        assert len(errors.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@with_javascript
async def test_the_javascript_client_does_not_wait_for_the_rest_of_an_answer_that_was_cut_off(
    nats_server: NatsServer, javascript: Path
) -> None:
    client = await nats.connect(nats_server.url)

    async def begin(message: Msg) -> None:
        assert message.reply
        await client.publish(message.reply, b'{"choices": [{"delta": {"content": "well"}}]}')

    await client.subscribe("pagemesh.v1.chat.completions", cb=begin)
    script = (javascript / "nats_client.mjs").read_text()
    assert "SILENCE_MS_MAX = 60_000" in script
    impatient = javascript / "impatient.mjs"
    impatient.write_text(script.replace("SILENCE_MS_MAX = 60_000", "SILENCE_MS_MAX = 500"))
    command = ("node", impatient.name, "--nats", nats_server.url, "--model", "m", QUESTION)
    try:
        code, out, errors = await run(*command, folder=javascript)
    finally:
        await client.close()
    assert (code, out) == (1, "well") and errors.startswith("the answer has no end: ")
