"""Children must not outlive the process that started them, even if that gets a SIGKILL.

``leash`` asks the kernel to kill this process when its parent dies. Run as a module, it does so for
another program: ``python -m pagemesh.cli.mesh.leash PARENT_PID PROGRAM ARGUMENT...``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def leash(parent_pid: int) -> None:
    """Die with ``parent_pid``; exit at once if it is dead already. Linux only: on other systems,
    children are stopped only by an orderly stop."""
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
