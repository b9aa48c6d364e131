"""``pagemesh cache``: inspect what a mesh's pagers cache, pin prefixes, invalidate prefixes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from pagemesh.cli.caching.cache_prefix import Prefix, prefixes
from pagemesh.cli.caching.cache_sweep import Answers, wait_until_swept
from pagemesh.cli.caching.cache_tables import (
    invalidated_text,
    lines_text,
    pinned_text,
    stats_text,
    unpinned_text,
)
from pagemesh.cli.client_config import ClientConfig
from pagemesh.cli.gateway_url import client_config, gateway_flags
from pagemesh.cli.operator import Mesh, bus_config, bus_flags, connected, fault_entry
from pagemesh.cli.param_types import Counts, Digits, Whole
from pagemesh.cli.words import typed
from pagemesh.wire.cache_messages import (
    LINES_MAX,
    PIN_TTL_S_MAX,
    AskCacheStats,
    AskCacheTop,
    AskCacheTree,
    CacheInvalidated,
    CacheStats,
    CacheTop,
    CacheTree,
    InvalidateCache,
    PinPrefix,
    PrefixPinned,
    PrefixUnpinned,
    UnpinPrefix,
)
from pagemesh.wire.errors import Absent, Fault, Gone
from pagemesh.wire.messages import Message

A = TypeVar("A", bound=Message)
F = TypeVar("F", bound=Callable[..., Any])
After = Callable[[Mesh, Answers], Awaitable[Answers]]
_TOKENS = Counts(0, 0xFFFF_FFFF, "token ids such as 1,15,220")
_ROOT_HELP = "Only the tree whose root starts with these hexadecimal digits."


def _door(command: F) -> F:
    """Add the flags that all commands share."""
    command = bus_flags(command)
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, an entry per host.")(
        command
    )


@click.group()
def cache() -> None:
    """Inspect a mesh's cache, pin prefixes, invalidate prefixes."""


@cache.command()
@_door
def stats(as_json: bool, **arguments: Any) -> int:
    """Show pages by state, hits, pins, and why pages left the cache."""
    return _each(arguments, "stats", [AskCacheStats()], CacheStats, stats_text, as_json=as_json)


@cache.command()
@click.option("--root", type=Digits(), default="", metavar="HEX", help=_ROOT_HELP)
@click.option("--first", type=Whole(0), default=0, help="Number of edges to skip.")
@click.option("--limit", type=Whole(1, LINES_MAX), default=100, show_default=True,
              help="Maximum number of edges.")  # fmt: skip
@_door
def tree(root: str, first: int, limit: int, as_json: bool, **arguments: Any) -> int:
    """List the edges of the prefix trees, without their tokens."""
    ask = AskCacheTree(root=root, first=first, limit=limit)
    return _each(arguments, "tree", [ask], CacheTree, lines_text, as_json=as_json)


@cache.command()
@click.option("--by", type=click.Choice(["reuse", "size"]), default="reuse", show_default=True,
              help="Order: most prefill saved, or longest prefix.")  # fmt: skip
@click.option("--root", type=Digits(), default="", metavar="HEX", help=_ROOT_HELP)
@click.option("--limit", type=Whole(1, LINES_MAX), default=20, show_default=True,
              help="Maximum number of edges.")  # fmt: skip
@_door
def top(by: Any, root: str, limit: int, as_json: bool, **arguments: Any) -> int:
    """List the most valuable edges of the prefix trees."""
    ask = AskCacheTop(by=by, root=root, limit=limit)
    return _each(arguments, "top", [ask], CacheTop, lines_text, as_json=as_json)


@cache.command()
@click.option("--text", metavar="TEXT", help="The prefix as text: the start of completion prompts.")
@click.option("--messages", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="The prefix as chat messages: a JSON list, as in a request.")  # fmt: skip
@click.option("--salt", default="", metavar="SALT", help="The cache_salt that the requests use.")
@click.option("--root", metavar="HEX", help="The root of --tokens, 64 hexadecimal digits.")
@click.option("--tokens", type=_TOKENS, help="The prefix as token ids; needs --root.")
@click.option("--ttl-s", type=Whole(1, PIN_TTL_S_MAX), metavar="SECONDS",
              help="Remove the pin after this time.  [default: never]")  # fmt: skip
@gateway_flags
@_door
def pin(
    text: str | None,
    messages: Path | None,
    salt: str,
    root: str | None,
    tokens: tuple[int, ...] | None,
    ttl_s: int | None,
    as_json: bool,
    **arguments: Any,
) -> int:
    """Protect a cached prefix from eviction.

    The gateway tokenizes text and messages. The API key (PAGEMESH_API_KEY) tells it whose cache
    they are in.
    """
    bus_config(arguments)  # report wrong settings before asking the gateway
    # Token ids need no gateway, so an ambiguous one must not be an error.
    client = client_config(arguments) if tokens is None else ClientConfig()
    wanted = prefixes(Prefix(text, messages, salt, root, tokens), client)
    asks = [PinPrefix(root=root, tokens=ids, ttl_s=ttl_s) for root, ids in wanted]
    return _each(arguments, "pin", asks, PrefixPinned, pinned_text, as_json=as_json)


@cache.command()
@click.argument("name", metavar="[PIN]", required=False)
@click.option("--all", "everything", is_flag=True, help="Remove all pins.")
@_door
def unpin(name: str | None, everything: bool, as_json: bool, **arguments: Any) -> int:
    """Remove a pin listed by `pagemesh cache stats`, or all pins."""
    if (name is None) != everything:
        raise click.UsageError("give either a pin or --all")
    try:
        ask = msgspec.convert({"pin": name}, UnpinPrefix)
    except msgspec.ValidationError:
        raise click.UsageError(f"{str(name)[:80]!r} is no pin") from None
    return _each(arguments, "unpin", [ask], PrefixUnpinned, unpinned_text, as_json=as_json)


@cache.command()
@click.option("--root", type=Digits(), metavar="HEX",
              help="The root that starts with these hexadecimal digits.")  # fmt: skip
@click.option("--model", metavar="NAME", help="All roots of a model.")
@click.option("--tenant", metavar="NAME", help="All roots of a tenant.")
@click.option("--idle", is_flag=True, help="Everything that is neither in use nor pinned.")
@_door
def invalidate(
    root: str | None,
    model: str | None,
    tenant: str | None,
    idle: bool,
    as_json: bool,
    **arguments: Any,
) -> int:
    """Invalidate cached prefixes.

    New requests no longer match them; running sequences keep their pages.
    """
    named: dict[Any, str | None] = {"root": root, "model": model, "tenant": tenant}
    given = [(what, name) for what, name in named.items() if name is not None]
    given += [("idle", "")] if idle else []
    if len(given) != 1:
        raise click.UsageError("give one of --root, --model, --tenant and --idle")
    what, name = given[0]
    ask = InvalidateCache(what=what, name=typed(name))
    answers = (CacheInvalidated, partial(invalidated_text, asked=ask))
    return _each(arguments, "invalidate", [ask], *answers, as_json=as_json, after=_swept)


def _each(
    arguments: Mapping[str, object],
    verb: str,
    asks: list[A],
    kind: type[Any],
    show: Callable[[Any], str],
    *,
    as_json: bool,
    after: After | None = None,
) -> int:
    """Ask every pager and show its answer. Returns 1 if one failed; a pager that has nothing of
    what was named has not failed as long as another has it."""
    answers = asyncio.run(_ask(arguments, verb, asks, kind, after))
    if as_json:
        entries = [_entry(host, answer) for host, answer in answers]
        click.echo(msgspec.json.format(msgspec.json.encode(entries), indent=2).decode())
    else:
        for host, answer in answers:
            text = f"{host}: {answer}" if isinstance(answer, Fault) else show(answer)
            click.echo(text, err=isinstance(answer, Fault))
    return 0 if _is_done([answer for _, answer in answers]) else 1


def _is_done(answers: Sequence[Message | Fault]) -> bool:
    """Whether at least one pager did it, and the others have nothing of what was named."""
    faults = [answer for answer in answers if isinstance(answer, Fault)]
    return len(faults) < len(answers) and all(map(_has_nothing, faults))


def _has_nothing(error: Fault) -> bool:
    """Whether a pager answered that it has nothing of what was named. What a pager that is not
    there has is unknown."""
    return isinstance(error, Gone) and not isinstance(error, Absent)


async def _ask(
    arguments: Mapping[str, object],
    verb: str,
    asks: list[A],
    kind: type[Any],
    after: After | None,
) -> Answers:
    async with connected(bus_config(arguments)) as mesh:
        found = [pair for ask in asks for pair in (await mesh.ask(verb, ask, kind)).items()]
        return found if after is None else await after(mesh, found)


async def _swept(mesh: Mesh, answers: Answers) -> Answers:
    return await wait_until_swept(mesh, answers, lambda line: click.echo(line, err=True))


def _entry(host: str, answer: Message | Fault) -> object:
    return fault_entry(host, answer) if isinstance(answer, Fault) else answer
