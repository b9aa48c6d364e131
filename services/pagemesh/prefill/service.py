"""The prefill service."""

from __future__ import annotations

from pagemesh.engine.worker.service import run_worker
from pagemesh.prefill.role import role_settings
from pagemesh.runtime.service import Stop
from pagemesh.runtime.service_config import ServiceConfig


async def run(config: ServiceConfig, stop: Stop) -> None:
    """Serve until ``stop``, then drain. Raises ``ConfigError``."""
    await run_worker(config, stop, role_settings(config.worker))
