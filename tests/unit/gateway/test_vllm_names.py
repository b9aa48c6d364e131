"""The gauges that have vLLM's names: what a load balancer reads of a model's mesh."""

from __future__ import annotations

import pytest
from msgspec import structs
from tests.unit.gateway.routes import FACTS, pager, worker

from pagemesh.gateway.measures import vllm_aliases
from pagemesh.wire.presence import Announce, Load


def announced(name: str, host: str, running: int, waiting: int) -> Announce:
    load = Load(running_count=running, waiting_count=waiting)
    return structs.replace(worker(name, "decode", host=host), load=load)


def told(model: str, workers: list[Announce], pagers: list[Announce]) -> dict[str, str]:
    """Values by name and labels."""
    lines = vllm_aliases(model, workers, pagers).decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_a_mesh_is_told_as_one_server_whose_hosts_have_a_pool_each() -> None:
    workers = [
        announced("p", "a", 1, 2), announced("d", "a", 10, 20), announced("d", "b", 100, 200),
    ]  # fmt: skip
    pagers = [pager("a", free=40), pager("b", free=100), pager("another's", free=1_000)]
    assert told("tiny", workers, pagers) == {
        'vllm:num_requests_running{model_name="tiny"}': "111",
        'vllm:num_requests_waiting{model_name="tiny"}': "222",
        'vllm:kv_cache_usage_perc{model_name="tiny"}': "0.300000",
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="200"}': "1",
    }


@pytest.mark.parametrize(("free", "usage"), [(100, "0.000000"), (101, "0.000000"), (0, "1.000000")])
def test_usage_lies_between_none_and_all(free: int, usage: str) -> None:
    found = told("tiny", [announced("d", "a", 0, 0)], [pager("a", free=free)])
    assert found['vllm:kv_cache_usage_perc{model_name="tiny"}'] == usage


def test_without_anybody_who_serves_it_a_model_has_nothing() -> None:
    assert set(told("other", [announced("d", "a", 1, 1)], [pager("a")]).values()) >= {"0"}
    assert told("other", [], [pager("a")]) == told("other", [worker("d", "decode")], [pager("a")])
    assert told("other", [], [])['vllm:cache_config_info{block_size="0",num_gpu_blocks="0"}'] == "1"


def test_a_name_with_quotes_is_told_as_the_format_has_it() -> None:
    name = 'a"b\\c\nd'
    facts = structs.replace(FACTS, model=name)
    found = told(name, [structs.replace(announced("d", "a", 7, 0), model=facts)], [])
    assert found['vllm:num_requests_running{model_name="a\\"b\\\\c\\nd"}'] == "7"
