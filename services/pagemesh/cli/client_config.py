"""Settings of the commands that talk to a running mesh."""

# ruff: noqa: RUF009  (a Secret is immutable, which ruff cannot know)
from __future__ import annotations

from dataclasses import dataclass

from pagemesh.runtime.config import Secret, setting


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Where the mesh is and who asks."""

    url: str = setting("http://127.0.0.1:8000", "URL", "URL of the gateway.")
    api_key: Secret = setting(Secret(), "API_KEY", "API key for the gateway.")
