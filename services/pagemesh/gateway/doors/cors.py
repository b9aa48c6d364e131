"""Pages of other origins, as far as their origins are allowed.

A browser asks before a page's own request (a preflight, which carries no key) and shows the
answer to the page only if its headers allow that: so this stands around the guard, and errors
have those headers too.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from pagemesh.runtime.origins import ANY_ORIGIN

METHODS = ("GET", "POST")
SHOWN_HEADERS = ("X-Request-Id", "Retry-After", "Idempotent-Replayed")
"""Of answers: what a page may read beside the few headers that every page may."""


def for_pages(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """``app`` for pages of ``origins`` (``parse_origins``) too; without any, ``app`` itself.

    Pages may send any header, since SDKs add their own, but no cookies, which mean nothing here.
    Where a browser asks whether a page of the internet may look into our network, it may if
    somebody named its origin.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=METHODS,
        allow_headers=("*",),
        allow_private_network=ANY_ORIGIN not in origins,
        expose_headers=SHOWN_HEADERS,
    )
