"""``pagemesh health URL``: a health check for containers without curl."""

from __future__ import annotations

import re

import click
import httpx

from pagemesh.cli.client_config import ClientConfig
from pagemesh.runtime.ports import is_url, shown_urls
from pagemesh.wire.errors import ConfigError, PagemeshError

_TIMEOUT_S = 2.0
_REASON_CHARACTERS_MAX = 200
_READY = "/health/ready"
_NUMBER = re.compile(r"^\[Errno -?\d+\] ")


class Unhealthy(PagemeshError):
    """The service did not answer with success."""


@click.command()
@click.argument("url")
def health(url: str) -> int:
    """Exit 0 if URL answers with success, 1 if not, 2 if it is not a URL.

    A URL without a path is taken for a gateway, which is asked whether it can serve requests.
    """
    if not is_url(url, ("http", "https")):
        raise _no_url(url)
    try:
        if (named := httpx.URL(url)).path == "/":
            url = str(named.copy_with(path=_READY))
        answer = httpx.get(url, timeout=_TIMEOUT_S, trust_env=False)
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, UnicodeError):
        raise _no_url(url) from None
    except httpx.TimeoutException:
        raise Unhealthy(f"{shown_urls(url)}: no answer within {_TIMEOUT_S:.0f} s") from None
    except httpx.HTTPError as error:
        reason = _NUMBER.sub("", str(error)).lower() or type(error).__name__
        raise Unhealthy(f"{shown_urls(url)}: {reason}") from None
    if not answer.is_success:
        status = answer.status_code
        hint = f"; a gateway answers at {_READY}" if status == httpx.codes.NOT_FOUND else ""
        raise Unhealthy(f"{shown_urls(url)}: status {status}{_why(answer)}{hint}")
    return 0


def _no_url(url: str) -> ConfigError:
    return ConfigError(
        f"{shown_urls(url)!r} is not an http:// or https:// URL such as {ClientConfig().url}"
    )


def _why(answer: httpx.Response) -> str:
    """The reason that a gateway states in its answer; empty for any other server."""
    try:
        reason = answer.json()["reason"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return f", {reason[:_REASON_CHARACTERS_MAX]}" if isinstance(reason, str) else ""
