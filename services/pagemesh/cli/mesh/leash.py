"""Children must not outlive the process that started them, not even its kill -9.

``leash`` asks the kernel to kill this process when its parent dies. Run as a module it puts
another program on the leash: ``python -m pagemesh.cli.mesh.leash PARENT_PID PROGRAM ARGUMENT...``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def leash(parent_pid: int) -> None:
    """Die with ``parent_pid``; exit at once when it is dead already. Linux only: elsewhere
    an orderly stop is all there is."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it died before the kernel was asked
        raise SystemExit(1)


if __name__ == "__main__":
    leash(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
