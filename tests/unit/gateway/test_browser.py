"""A page of another origin in a real browser, where one is installed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.gateway.fake_mesh import fake_mesh
from tests.unit.gateway.support import MODEL

from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.settings import GatewayConfig

KEY = "k" * 20
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
ANSWER_S_MAX = 60.0
END_S_MAX = 10.0
SCRIPT = """
const url = URL_OF_GATEWAY, authorization = "Bearer KEY";
function ask(body, headers) {
  const sent = {authorization, "content-type": "application/json", ...headers};
  const asked = JSON.stringify({prompt: "abcdef", max_tokens: 6, ...body});
  return fetch(url + "/v1/completions", {method: "POST", headers: sent, body: asked});
}
const told = {};
async function streamed() {
  const answer = await ask({stream: true}), pieces = [];
  const reader = answer.body.getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    pieces.push(new TextDecoder().decode(part.value));
  }
  const id = answer.headers.get("x-request-id");
  return {id, piece_count: pieces.length, text: pieces.join("")};
}
async function run() {
  try {
    const models = await fetch(url + "/v1/models", {headers: {authorization}});
    told.models = (await models.json()).data.map((model) => model.id);
    const whole = await ask({}, {"x-stainless-lang": "js"});
    told.text = (await whole.json()).choices[0].text;
    told.stream = await streamed();
    const wrong = await ask({temperature: "hot"});
    told.wrong = [wrong.status, (await wrong.json()).error.param];
    const keyless = await ask({}, {authorization: ""});
    told.keyless = [keyless.status, (await keyless.json()).error.code];
  } catch (error) {
    told.error = String(error);
  }
  await fetch("/told", {method: "POST", body: JSON.stringify(told)});
}
run();
"""


class Page:
    """A site with one page, which tells this test what it saw of the gateway."""

    def __init__(self, gateway_url: str) -> None:
        script = SCRIPT.replace("URL_OF_GATEWAY", json.dumps(gateway_url)).replace("KEY", KEY)
        self._html = f"<!doctype html><script>{script}</script>".encode()
        self.told: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            if head.startswith("post /told "):
                size = int(head.split("content-length:")[1].split()[0])
                self.told.set_result(json.loads(await reader.readexactly(size)))
            body = self._html if head.startswith("get / ") else b""
            kind = f"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: {len(body)}\r\n"
            writer.write(kind.encode() + b"connection: close\r\n\r\n" + body)
            await writer.drain()


@contextlib.asynccontextmanager
async def browser(url: str, profile: Path) -> AsyncIterator[None]:
    """A headless one that shows ``url``."""
    assert BROWSER is not None
    process = await asyncio.create_subprocess_exec(
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", "--remote-debugging-port=0",
        f"--user-data-dir={profile}", url,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        try:
            async with asyncio.timeout(END_S_MAX):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
@pytest.mark.parametrize("allowed", [True, False], ids=["allowed", "not allowed"])
async def test_a_page_of_another_origin_reads_answers_streams_and_errors_if_it_is_allowed(
    shared_nats_server: NatsServer, model_folder: Path, tmp_path: Path, allowed: bool
) -> None:
    pages: list[Page] = []
    server = await asyncio.start_server(lambda r, w: pages[0].answer(r, w), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    origins = (f"http://localhost:{port if allowed else 1}",)
    config = GatewayConfig(http_port=0, cors_origins=origins)
    async with (
        server,
        fake_mesh(
            shared_nats_server.url, model_folder, api_keys=f"me:{KEY}", config=config
        ) as mesh,
    ):
        mesh.worker.pause_s = 0.05
        pages.append(Page(mesh.url))
        async with (
            browser(f"http://localhost:{port}/", tmp_path / "profile"),
            asyncio.timeout(ANSWER_S_MAX),
        ):
            told = await pages[0].told
    if not allowed:
        assert set(told) == {"error"} and "Failed to fetch" in told["error"]
        assert not mesh.worker.submits, "the preflight was refused"
        return
    assert "error" not in told, told["error"]
    assert (told["models"], told["text"]) == ([MODEL], "fedcba")
    assert told["stream"]["piece_count"] > 3 and "[DONE]" in told["stream"]["text"]
    assert len(told["stream"]["id"]) == 32
    assert told["wrong"] == [400, "temperature"]
    assert told["keyless"] == [401, "invalid_api_key"]
