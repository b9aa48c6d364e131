"""How many examples a machine runs: with ``PAGEMESH_LONG=1`` 10,000, for an hour or more."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

IS_LONG = os.environ.get("PAGEMESH_LONG") == "1"
EXAMPLES = settings(
    max_examples=10_000 if IS_LONG else 60,
    stateful_step_count=50,
    suppress_health_check=list(HealthCheck),
)
