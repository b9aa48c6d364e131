"""``python -m pagemesh.engine.cuda.probe``: what GPU a worker would find, as one line of JSON.

For processes that only want to know: asking CUDA initialises it, which a process with children must
not do. The line has either ``error``, in the words of the worker, or ``name``, ``torch``,
``free_bytes`` and ``total_bytes``.
"""

from __future__ import annotations

import json

import torch

from pagemesh.engine.cuda.opening import find_device
from pagemesh.wire.errors import ConfigError, first_line


def found() -> dict[str, object]:
    """The fields of the line, about the first GPU that this process may use."""
    try:
        device, _ = find_device("cuda")
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
    except ConfigError as error:
        return {"error": str(error)}
    except Exception as error:  # whatever a broken driver causes
        return {"error": f"PAGEMESH_DEVICE=cuda (--device): {first_line(error)}"}
    return {"name": name, "torch": torch.__version__, "free_bytes": free, "total_bytes": total}


if __name__ == "__main__":
    print(json.dumps(found()))  # noqa: T201
