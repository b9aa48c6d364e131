"""A pytest plugin: kernels come from the library that ``PAGEMESH_TEST_LIBRARY`` names."""

from __future__ import annotations

import os
from pathlib import Path

from pagemesh.kernels.native import library

library.LIBRARY_PATH = Path(os.environ["PAGEMESH_TEST_LIBRARY"])
