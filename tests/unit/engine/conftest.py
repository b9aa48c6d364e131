"""Imported first, so that torch's threads are set up as the engine sets them up."""

import pagemesh.engine  # noqa: F401
