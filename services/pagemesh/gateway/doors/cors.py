"""Cross-origin requests (CORS): web pages of other origins, if their origins are allowed.

Before a page's own request a browser sends a preflight, which carries no key, and it shows the
answer to the page only if the answer's headers allow that. So this stands around the guard, and
errors carry those headers too.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from pagemesh.runtime.origins import ANY_ORIGIN

METHODS = ("GET", "POST")
SHOWN_HEADERS = ("X-Request-Id", "Retry-After", "Idempotent-Replayed")
"""Headers of answers that a page may read, besides the few that every page may."""


def for_pages(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """``app`` for pages of ``origins`` (``parse_origins``) too; without any, ``app`` itself.

    Pages may send any header, since SDKs add their own, but no cookies, which mean nothing here. A
    browser that asks whether a page may reach into a private network is told yes only if the
    origins are listed by name.
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
