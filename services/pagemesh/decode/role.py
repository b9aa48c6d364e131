"""What decode does with the shared worker: draw tokens, and prompts in small chunks."""

from __future__ import annotations

from pagemesh.engine.worker.settings import RoleSettings
from pagemesh.runtime.settings import WorkerConfig

_CHUNK_SHARE = 4


def role_settings(config: WorkerConfig) -> RoleSettings:
    """A prompt gets a part of each step, so that those who draw are not held up for long."""
    return RoleSettings(
        role="decode",
        hand_over=False,
        step_tokens_max=config.step_tokens_max,
        chunk_tokens_max=max(1, config.step_tokens_max // _CHUNK_SHARE),
    )
