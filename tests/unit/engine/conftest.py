"""Imported before torch, so that its threads wait as a service's threads wait."""

from tests.kernels.levels import level

from pagemesh.kernels.native.library import bound_spinning

__all__ = ["level"]

bound_spinning()
