"""Import this before torch: its threads then wait the way a worker's threads do."""

from pagemesh.kernels.native.library import bound_spinning

bound_spinning()
