"""Imported before torch, so that its threads wait as a worker's threads wait."""

from pagemesh.kernels.native.library import bound_spinning

bound_spinning()
