"""Keeps Python's garbage collector away from what a service has loaded.

A full collection walks every object of every imported module, some 200,000 with torch and
transformers: over 100 ms in which nothing else happens, at an unpredictable moment.
"""

from __future__ import annotations

import gc

from pagemesh.runtime import huge_pages


def spare_loaded() -> None:
    """Collect once more, exempt what is alive now from all later collections, and move it to huge
    pages. Call it when a service has loaded what it keeps for good, before it takes work."""
    gc.collect()
    huge_pages.gather(gc.get_objects())
    gc.freeze()
