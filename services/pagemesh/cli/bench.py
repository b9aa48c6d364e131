"""``pagemesh bench``: how fast a running mesh answers."""

from __future__ import annotations

import json
from itertools import repeat
from random import Random, randrange
from typing import Any

import click
import httpx
import uvloop
from rich.console import Console
from rich.progress import Progress

from pagemesh.cli.answers import Tokenized
from pagemesh.cli.benching.client import Server, complete
from pagemesh.cli.benching.load import Outcome, ask_all
from pagemesh.cli.benching.prompts import SAMPLE, moments, prompts
from pagemesh.cli.benching.report import Asked, json_report, text_report
from pagemesh.cli.chat_stream import ChatError, answer_of, client, place, served_model, trusted
from pagemesh.cli.gateway_url import client_config, gateway_flags, pool_dir_flag
from pagemesh.cli.main import EXIT_STOPPED
from pagemesh.cli.options import check_variables
from pagemesh.cli.param_types import Number, Whole
from pagemesh.wire.errors import ConfigError

EXIT_FAILED = 1
_CONCURRENCY, _REQUESTS_EACH, _RATE_S = 8, 4, 10
_WARM_TOKENS = 8
_SEED_MAX = 1 << 31
_TOKENS = Whole(1)


@click.command()
@click.option("--requests", "request_count", type=Whole(1), default=None,
              help="Number of requests.  [default: 4 times --concurrency; with --rate, 10 seconds' "
              "worth]")  # fmt: skip
@click.option("--concurrency", type=Whole(1, 1 << 14), default=None,
              help="Requests in flight; each that ends starts another.  [default: 8]")  # fmt: skip
@click.option("--rate", type=Number(0, 1 << 14, min_open=True), default=None,
              help="Requests per second, at random moments; excludes --concurrency and sets no "
              "limit to requests in flight.")  # fmt: skip
@click.option("--input-tokens", type=_TOKENS, default=512, show_default=True,
              help="Tokens per prompt, drawn at random.")  # fmt: skip
@click.option("--shared-tokens", type=Whole(0), default=0, show_default=True,
              help="Tokens that all prompts start with, part of --input-tokens.")  # fmt: skip
@click.option("--output-tokens", type=_TOKENS, default=128, show_default=True,
              help="Tokens per answer, exactly; sampling is greedy.")  # fmt: skip
@click.option("--seed", type=Whole(0, _SEED_MAX), default=None,
              help="Seed of prompts and moments; repeated prompts may be cached.  "
              "[default: random]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print every number as JSON.")
@gateway_flags
@pool_dir_flag
def bench(
    request_count: int | None,
    concurrency: int | None,
    rate: float | None,
    input_tokens: int,
    shared_tokens: int,
    output_tokens: int,
    seed: int | None,
    as_json: bool,
    **arguments: Any,
) -> int:
    """Measure how fast a running mesh answers.

    Times are measured at the client: from sending a request to its first text, and between texts.
    If the mesh requires an API key, set PAGEMESH_API_KEY.
    """
    check_variables()
    if rate is not None and concurrency is not None:
        raise ConfigError("--rate and --concurrency exclude each other; give one of them")
    if shared_tokens > input_tokens:
        raise ConfigError("--shared-tokens is more than --input-tokens, which include them")
    at_once = _CONCURRENCY if concurrency is None else concurrency
    if request_count is None:
        request_count = _REQUESTS_EACH * at_once if rate is None else max(1, round(_RATE_S * rate))
    seed = randrange(_SEED_MAX) if seed is None else seed
    config = client_config(arguments)
    with client(config) as http:
        model, tokens = served_model(http), sample_tokens(http)
        url = str(http.base_url.copy_with(userinfo=b"")).rstrip("/")
    server = Server(
        model, url, model, key=config.api_key.reveal(),
        tls=trusted() if url.startswith("https:") else None,
    )  # fmt: skip
    asked = Asked(
        model, url, request_count, at_once if rate is None else None, rate, input_tokens,
        shared_tokens, output_tokens, seed,
    )  # fmt: skip
    outcome = run(server, asked, tokens)
    if as_json:
        click.echo(json.dumps(json_report(asked, outcome), indent=2))
    else:
        click.echo(text_report(asked, outcome))
    if outcome.stopped:
        return EXIT_STOPPED
    return EXIT_FAILED if outcome.failures else 0


def sample_tokens(http: httpx.Client) -> list[int]:
    """Sorted token ids to build prompts from. Raises ``ChatError``."""
    body = {"prompt": SAMPLE, "add_special_tokens": False}
    try:
        tokens = answer_of(http.post("/tokenize", json=body), Tokenized).tokens
    except httpx.HTTPError as error:
        raise ChatError(f"{place(http)}: {type(error).__name__}") from None
    if not tokens:
        raise ChatError(f"{place(http)}/tokenize returned no tokens to make prompts of")
    return sorted(set(tokens))


def run(server: Server, asked: Asked, tokens: list[int]) -> Outcome:
    """Run the benchmark, showing progress on stderr if that is a terminal; Ctrl-C ends it early.
    Raises ``RequestFailedError`` when a small warm-up request, which is not counted, fails."""
    texts = prompts(
        tokens, asked.requests, asked.input_tokens, asked.shared_tokens, Random(asked.seed)
    )
    moments_s = repeat(0.0) if asked.rate is None else moments(asked.rate, Random(asked.seed))
    [warm] = prompts(tokens, 1, _WARM_TOKENS, 0, Random(f"warm {asked.seed}"))
    console = Console(stderr=True)

    async def everything(progress: Progress) -> Outcome:
        await complete(server, warm, 1)
        task = progress.add_task("asking", total=asked.requests)
        return await ask_all(
            server, zip(moments_s, texts, strict=False), asked.output_tokens,
            concurrency=asked.concurrency, on_end=lambda: progress.advance(task),
        )  # fmt: skip

    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        outcome: Outcome = uvloop.run(everything(progress))
    return outcome
