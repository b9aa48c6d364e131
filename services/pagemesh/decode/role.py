"""What decode does with the shared worker: draw tokens, and compute prompts beside them."""

from __future__ import annotations

from pagemesh.engine.worker.settings import RoleSettings
from pagemesh.runtime.settings import WorkerConfig


def role_settings(config: WorkerConfig) -> RoleSettings:
    """A prompt may fill a whole step in which no row draws a token. How much of the other steps
    prompts get is decided step by step (``engine.worker.batching``)."""
    return RoleSettings(
        role="decode",
        hand_over=False,
        step_tokens_max=config.step_tokens_max,
        chunk_tokens_max=config.step_tokens_max,
    )
