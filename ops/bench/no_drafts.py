"""Benchmarks on random weights compute every token that they count.

What such a model says soon repeats itself, so that its drafts (ops/adr/0029-drafts.md) are nearly
always right, which those of a text are not. ``bench_drafts`` says what drafts bring.
"""

from __future__ import annotations

NO_DRAFTS = {"PAGEMESH_DRAFT_TOKENS_MAX": "0"}
"""Environment of a mesh."""
