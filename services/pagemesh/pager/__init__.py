"""The KV-page manager: it owns every page of KV memory on a host."""

from pathlib import Path

import pagemesh.wire
from pagemesh.runtime.compiled import prefer_compiled

IS_COMPILED = prefer_compiled(Path(__file__).parent, map(Path, pagemesh.wire.__path__))
"""Its core runs compiled (``services/compile_cores.py``)."""
