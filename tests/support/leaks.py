"""What a test may leave behind: nothing."""

from __future__ import annotations

import os
from pathlib import Path


def descendants(root: int) -> dict[int, str]:
    """Living descendants of the process ``root`` (a pid), with their command lines."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        fields = stat.rpartition(")")[2].split()
        if fields[0] != "Z":
            parents[int(entry.name)] = int(fields[1])
    found: dict[int, str] = {}
    wave = {root}
    while wave:
        wave = {pid for pid, parent in parents.items() if parent in wave and pid not in found}
        found |= {pid: _command(pid) for pid in wave}
    return found


def own_descendants() -> dict[int, str]:
    return descendants(os.getpid())


def pool_files(folder: Path) -> set[Path]:
    """Pool and lock files in a pool folder."""
    if not folder.is_dir():
        return set()
    return {path for path in folder.rglob("*") if path.suffix in (".pool", ".lock")}


def _command(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()
