"""Imported before torch, so that its threads wait the way a service's threads do."""

from tests.kernels.levels import level

from pagemesh.kernels.native.library import bound_spinning

__all__ = ["level"]

bound_spinning()
