"""What is cached for a time only, and tenants that cannot get in each other's way."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.mesh import Mesh

ALICE, BOB = "a" * 32, "b" * 32
PROMPT_TOKENS = 512


def ask(mesh: Mesh, key: str, first: int, **body: Any) -> httpx.Response:
    """A prompt that starts with ``first`` and is like no other."""
    prompt = [(first + index * 7) % 256 for index in range(PROMPT_TOKENS)]
    wanted = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, **body}
    return httpx.post(
        f"{mesh.url}/v1/completions", json=wanted, timeout=60.0,
        headers={"Authorization": f"Bearer {key}"},
    )  # fmt: skip


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


@pytest.mark.slow
def test_what_has_a_time_to_live_goes_when_it_is_over_and_not_with_the_pager(
    pool_dir: Path, tiny_model: Path
) -> None:
    env = {
        "PAGEMESH_API_KEYS": f"alice:{ALICE},bob:{BOB}",
        "PAGEMESH_TENANT_LIMITS": "bob:cache_ttl_s=1",
    }
    with Mesh(pool_dir, model=tiny_model, env=env) as mesh:
        assert cached(ask(mesh, ALICE, 1, cache_ttl_s=2)) == 0
        assert cached(ask(mesh, ALICE, 1, cache_ttl_s=2)) > PROMPT_TOKENS // 2
        assert cached(ask(mesh, BOB, 2)) == 0
        assert cached(ask(mesh, ALICE, 3)) == 0
        time.sleep(2.1)
        assert cached(ask(mesh, ALICE, 1, cache_ttl_s=600)) == 0, "it was over"
        assert cached(ask(mesh, BOB, 2, cache_ttl_s=600)) == 0, "its tenant may have a second"
        kept_pages = 2 * PROMPT_TOKENS // 16
        mesh.wait_for(lambda: mesh.report().idle_pages <= kept_pages + 2, "pages are free again")
        mesh.kill("pager")
        mesh.wait_ready()
        time.sleep(1)
        assert cached(ask(mesh, ALICE, 3)) > PROMPT_TOKENS // 2
        assert cached(ask(mesh, ALICE, 1)) > PROMPT_TOKENS // 2, "its ten minutes go on"
        assert cached(ask(mesh, BOB, 2)) == 0, "its second was over meanwhile"


@pytest.mark.slow
def test_a_flood_of_one_tenant_costs_another_neither_its_cache_nor_its_turn(
    pool_dir: Path, tiny_model: Path
) -> None:
    env = {
        "PAGEMESH_API_KEYS": f"alice:{ALICE},bob:{BOB}",
        "PAGEMESH_TENANT_LIMITS": "alice:pages=40% requests=24,bob:pages=40%",
    }
    with Mesh(pool_dir, model=tiny_model, pool_bytes=2 << 20, env=env) as mesh:
        pages = mesh.report().total_pages
        assert pages < 24 * PROMPT_TOKENS // 16, "the flood is more than the pool holds"
        assert cached(ask(mesh, BOB, 1)) == 0
        with ThreadPoolExecutor(32) as threads:
            flood = [
                threads.submit(ask, mesh, ALICE, 2 + number, max_tokens=64) for number in range(32)
            ]
            for _ in range(4):
                assert cached(ask(mesh, BOB, 1)) > PROMPT_TOKENS // 2
            answers = [one.result() for one in flood]
        refused = [answer for answer in answers if answer.status_code != 200]
        assert len(answers) - len(refused) >= 24
        for answer in refused:
            error = answer.json()["error"]
            assert error["code"] == "quota_exceeded" and "limit of 24" in error["message"]
            assert answer.headers["retry-after"]
        assert cached(ask(mesh, BOB, 1)) > PROMPT_TOKENS // 2
        too_long = ask(mesh, ALICE, 9, max_tokens=1_300)  # fits the model and the pool
        assert too_long.status_code == 400
        assert too_long.json()["error"]["code"] == "quota_exceeded"
        mesh.wait_idle()
