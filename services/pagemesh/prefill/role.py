"""What prefill does with the shared worker: compute prompts, give sequences away."""

from __future__ import annotations

from pagemesh.engine.worker.settings import RoleSettings
from pagemesh.runtime.settings import WorkerConfig


def role_settings(config: WorkerConfig) -> RoleSettings:
    """A prompt may fill a whole step: no sequence here waits for its next token."""
    return RoleSettings(
        role="prefill",
        hand_over=True,
        step_tokens_max=config.step_tokens_max,
        chunk_tokens_max=config.step_tokens_max,
    )
