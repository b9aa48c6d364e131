"""The gateway's metrics. Labels take values from small, fixed sets."""

from __future__ import annotations

import itertools

from pagemesh.runtime.metrics import counter, gauge, histogram
from pagemesh.runtime.metrics import render as render_metrics
from pagemesh.wire.presence import Announce

OUTCOMES = ("completed", "cancelled", "refused", "failed")
requests = counter(
    "gateway_requests_total", "Requests by outcome.", ("door", "endpoint", "outcome")
)
request_seconds = histogram(
    "gateway_request_duration_seconds",
    "Time from a request's arrival to its end (gen_ai.server.request.duration).",
    ("endpoint",),
)
first_token_seconds = histogram(
    "gateway_time_to_first_token_seconds",
    "Time from a request's arrival to its first token (gen_ai.server.time_to_first_token).",
    ("endpoint",),
)
token_seconds = histogram(
    "gateway_time_per_output_token_seconds",
    "Mean time per output token after the first, of each request "
    "(gen_ai.server.time_per_output_token).",
    ("endpoint",),
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)
prompt_tokens = counter("gateway_prompt_tokens_total", "Prompt tokens of ended requests.")
output_tokens = counter("gateway_output_tokens_total", "Tokens generated for ended requests.")
cached_tokens = counter("gateway_cached_tokens_total", "Prompt tokens found in the prefix cache.")
elsewhere_tokens = counter(
    "gateway_elsewhere_tokens_total",
    "Prompt tokens cached on another host, but not on the one the request was sent to.",
)
in_flight = gauge("gateway_requests_in_flight", "Prompts being answered now.")
connections = gauge("gateway_connections", "Open HTTP connections.")
attempts = counter(
    "gateway_attempts_total", "Attempts to submit requests to workers, including the first of each."
)
frames_lost = counter("gateway_frames_lost_total", "Frame messages detected as lost.")
orphans = counter(
    "gateway_orphans_total", "Times a worker was told to stop a sequence that no request waits for."
)
workers_lost = counter(
    "gateway_workers_lost_total",
    "Workers that went away: silent, left (they were stopped), or replaced by one of the same "
    "name.",
    ("reason",),
)
pagers_lost = counter(
    "gateway_pagers_lost_total",
    "Pagers that went away: silent, left (they were stopped), or replaced by one of the same name.",
    ("reason",),
)
ready = gauge("gateway_ready", "1 while a request would be served.")

# Create each series at start-up: ``rate`` misses the events with which a series begins.
for _one in itertools.product(("http", "bus"), ("chat", "text_completion"), OUTCOMES):
    requests.labels(*_one)
for _reason in ("silent", "left", "replaced"):
    workers_lost.labels(_reason)
    pagers_lost.labels(_reason)


def vllm_aliases(model: str, workers: list[Announce], pagers: list[Announce]) -> bytes:
    """The four gauges that load balancers already read from vLLM, under its names, for those who
    opt in. Only workers of ``model`` count. Usage is the share of pages that are neither free nor
    evictable."""
    workers = [one for one in workers if one.model is not None and one.model.model == model]
    running = sum(worker.load.running_count for worker in workers)
    waiting = sum(worker.load.waiting_count for worker in workers)
    pools = {w.host: w.model for w in workers if w.model is not None}
    total = sum(facts.pool_pages for facts in pools.values())
    free = sum(pager.free_pages for pager in pagers if pager.host in pools)
    usage = max(0.0, 1.0 - free / total) if total else 0.0
    page_size = next((facts.page_size for facts in pools.values()), 0)
    label = f'model_name="{_escaped(model)}"'
    config = f'block_size="{page_size}",num_gpu_blocks="{total}"'
    lines = (
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{{{label}}} {running}",
        "# TYPE vllm:num_requests_waiting gauge",
        f"vllm:num_requests_waiting{{{label}}} {waiting}",
        "# TYPE vllm:kv_cache_usage_perc gauge",
        f"vllm:kv_cache_usage_perc{{{label}}} {usage:.6f}",
        "# TYPE vllm:cache_config_info gauge",
        f"vllm:cache_config_info{{{config}}} 1",
        "",
    )
    return "\n".join(lines).encode()


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


__all__ = [
    "attempts",
    "cached_tokens",
    "connections",
    "elsewhere_tokens",
    "first_token_seconds",
    "frames_lost",
    "in_flight",
    "orphans",
    "output_tokens",
    "pagers_lost",
    "prompt_tokens",
    "ready",
    "render_metrics",
    "request_seconds",
    "requests",
    "token_seconds",
    "vllm_aliases",
    "workers_lost",
]
