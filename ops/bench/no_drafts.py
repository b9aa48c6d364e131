"""Benchmarks on random weights compute every token that they count.

The output of such a model soon repeats itself, so that its drafts (ops/adr/0029-drafts.md) are
nearly always right, unlike those of real text. ``bench_drafts`` measures the gain of drafts.
"""

from __future__ import annotations

NO_DRAFTS = {"PAGEMESH_DRAFT_TOKENS_MAX": "0"}
"""Environment variables of a mesh without drafts."""
