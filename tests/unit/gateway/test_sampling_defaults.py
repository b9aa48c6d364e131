"""What a client leaves out of how to draw is what the model's files recommend."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest
from openai import AsyncOpenAI
from tests.unit.gateway.fake_mesh import FakeMesh, fake_mesh
from tests.unit.gateway.support import MODEL, write_model

from pagemesh.gateway.api.openai_api import parse_chat, parse_completion
from pagemesh.gateway.api.sampling_defaults import OPENAI, SamplingDefaults, sampling_defaults
from pagemesh.runtime.model_folder import find_model
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.wire import subjects
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.work_messages import Sampling

RECOMMENDED: dict[str, Any] = {
    "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1,
}  # fmt: skip
NEUTRAL: dict[str, Any] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip
BEYOND_OPENAI = ("top_k", "min_p", "repetition_penalty")
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def folder_that_says(folder: Path, text: str) -> Path:
    write_model(folder)
    (folder / "generation_config.json").write_text(text)
    return folder


@pytest.fixture
def recommending(tmp_path: Path) -> Path:
    others = {"do_sample": False, "eos_token_id": 3, "max_new_tokens": 9, "top_h": None}
    return folder_that_says(tmp_path / MODEL, json.dumps(RECOMMENDED | others))


@pytest.fixture
async def mesh(shared_nats_server: NatsServer, recommending: Path) -> AsyncIterator[FakeMesh]:
    defaults = sampling_defaults(recommending, "auto")
    async with fake_mesh(shared_nats_server.url, recommending, defaults=defaults) as made:
        yield made


def drawn_by(made: Any) -> dict[str, Any]:
    return {name: getattr(made, name) for name in RECOMMENDED}


def asked(defaults: SamplingDefaults, **fields: Any) -> dict[str, Any]:
    """How tokens are drawn for a body with ``fields``; the same at both endpoints."""
    chat = json.dumps({"messages": MESSAGES, **fields}).encode()
    text = json.dumps({"prompt": "hi", **fields}).encode()
    found = drawn_by(parse_chat(chat, served=MODEL, defaults=defaults))
    assert drawn_by(parse_completion(text, served=MODEL, defaults=defaults)) == found
    return found


def test_what_the_file_recommends_holds_for_what_is_left_out(recommending: Path) -> None:
    defaults = sampling_defaults(recommending, "auto")
    assert asked(defaults) == asked(defaults, **dict.fromkeys(RECOMMENDED)) == RECOMMENDED
    assert defaults.recommended == RECOMMENDED


@pytest.mark.parametrize("name", RECOMMENDED)
def test_what_a_client_says_holds_though_it_be_the_neutral_value(
    recommending: Path, name: str
) -> None:
    defaults = sampling_defaults(recommending, "auto")
    assert asked(defaults, **{name: NEUTRAL[name]}) == RECOMMENDED | {name: NEUTRAL[name]}


def test_everything_is_openais_without_the_file_or_when_it_is_not_to_be_used(
    recommending: Path, model_folder: Path
) -> None:
    for defaults in (
        sampling_defaults(recommending, "none"),
        sampling_defaults(model_folder, "auto"),
    ):
        assert defaults == OPENAI
        assert asked(defaults) == NEUTRAL


def test_the_bundled_model_recommends_nothing() -> None:
    assert sampling_defaults(find_model("").path, "auto") == OPENAI


def test_some_of_it_may_be_missing_null_or_say_all(tmp_path: Path) -> None:
    text = '{"temperature": null, "top_p": 0.9, "top_k": -1}'
    defaults = sampling_defaults(folder_that_says(tmp_path / "m", text), "auto")
    assert defaults == SamplingDefaults(top_p=0.9)
    assert str(defaults) == "top_p 0.9"


def test_a_beam_search_draws_nothing_and_takes_no_recommendation(recommending: Path) -> None:
    body = {"messages": MESSAGES, "use_beam_search": True, "max_tokens": 4}
    defaults = sampling_defaults(recommending, "auto")
    ask = parse_chat(json.dumps(body).encode(), served=MODEL, defaults=defaults)
    assert drawn_by(ask) == NEUTRAL


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"temperature": -1}', "$.temperature"),
        ('{"temperature": "warm"}', "$.temperature"),
        ('{"temperature": NaN}', "$.temperature"),
        ('{"top_p": 1.5}', "$.top_p"),
        ('{"top_k": 2.5}', "$.top_k"),
        ('{"min_p": 2}', "$.min_p"),
        ('{"repetition_penalty": 0}', "$.repetition_penalty"),
        ("[]", "holds no JSON object"),
        ("{", "cannot be read as JSON"),
    ],
)
def test_a_file_that_cannot_be_followed_is_named(tmp_path: Path, text: str, named: str) -> None:
    folder = folder_that_says(tmp_path / "m", text)
    with pytest.raises(ConfigError) as caught:
        sampling_defaults(folder, "auto")
    assert str(folder / "generation_config.json") in str(caught.value)
    assert named in str(caught.value)
    if named.startswith("$"):
        assert "--generation-config none" in str(caught.value)


def last_sampling(mesh: FakeMesh) -> Sampling:
    return mesh.worker.submits[-1].sampling


async def test_openais_client_gets_them_unless_it_says_otherwise(mesh: FakeMesh) -> None:
    async with AsyncOpenAI(base_url=mesh.url + "/v1", api_key="none", max_retries=0) as client:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2)
        assert drawn_by(last_sampling(mesh)) == RECOMMENDED
        await client.completions.create(model=MODEL, prompt="hi", max_tokens=2, temperature=0)
        assert drawn_by(last_sampling(mesh)) == RECOMMENDED | {"temperature": 0.0}
        await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=2, temperature=1, top_p=1,
            extra_body={name: NEUTRAL[name] for name in BEYOND_OPENAI},
        )  # fmt: skip
        assert drawn_by(last_sampling(mesh)) == NEUTRAL
        [model] = (await client.models.list()).data
        assert model.model_extra is not None
        assert model.model_extra["sampling_defaults"] == RECOMMENDED


async def test_clients_of_the_bus_get_them_too(
    mesh: FakeMesh, shared_nats_server: NatsServer
) -> None:
    client = await nats.connect(shared_nats_server.url)
    try:
        body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
        await client.request(subjects.CHAT_COMPLETIONS, json.dumps(body).encode(), timeout=5)
        assert drawn_by(last_sampling(mesh)) == RECOMMENDED
        body |= {"top_k": -1, "min_p": None}
        await client.request(subjects.CHAT_COMPLETIONS, json.dumps(body).encode(), timeout=5)
        assert drawn_by(last_sampling(mesh)) == RECOMMENDED | {"top_k": 0}
        listed = await client.request(subjects.MODELS, b"", timeout=5)
        assert json.loads(listed.data)["data"][0]["sampling_defaults"] == RECOMMENDED
    finally:
        await client.close()


async def test_a_model_that_recommends_nothing_is_listed_as_before(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    async with (
        fake_mesh(shared_nats_server.url, model_folder) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as http,
    ):
        [model] = (await http.get("/v1/models")).json()["data"]
        assert "sampling_defaults" not in model
