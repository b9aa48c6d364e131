"""Compiled cores: the same sources as extension modules, where they were built.

``services/compile_cores.py`` compiles the pure modules of a service with mypyc, into the folder
``compiled`` of its package. ``prefer_compiled`` makes Python import those in place of the sources,
all or none of them, and only while the sources are the ones that were compiled, so that an edited
core runs as edited. Environment: ``PAGEMESH_COMPILED=0`` runs the sources.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

VARIABLE = "PAGEMESH_COMPILED"
FOLDER = "compiled"
STAMP = "sources"
"""The file in ``FOLDER`` that says what the modules were made from, how, and which they are."""
SUFFIX = EXTENSION_SUFFIXES[0]
"""File suffix of extension modules for this Python alone."""


class CompiledFinder(MetaPathFinder):
    """Finds modules by name among ``files``."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = {file.name.removesuffix(SUFFIX): str(file) for file in files}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (file := self._files.get(fullname)) is None:
            return None
        return spec_from_file_location(fullname, file, loader=ExtensionFileLoader(fullname, file))


def prefer_compiled(package: Path, used: Iterable[Path]) -> bool:
    """Import the compiled modules of ``package``, if they were made for this Python and from the
    current sources, including those in the folders ``used``. Call it before any module of
    ``package`` is imported. Returns whether the compiled modules are used."""
    folder = package / FOLDER
    if os.environ.get(VARIABLE) == "0":
        return False
    try:
        made_from, _recipe, *names = (folder / STAMP).read_text().split()
        files = [folder / name for name in names]
        if made_from != stamp_of([package, *used]) or not all(file.exists() for file in files):
            return False
    except (OSError, ValueError):
        return False
    sys.meta_path.insert(0, CompiledFinder(files))
    return True


def stamp_of(folders: Iterable[Path]) -> str:
    """A digest of every source below ``folders``, and of which Python this is."""
    digest = hashlib.sha256(SUFFIX.encode())
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            text = file.read_bytes()
            digest.update(f"{file.relative_to(folder).as_posix()} {len(text)}\n".encode())
            digest.update(text)
    return digest.hexdigest()
