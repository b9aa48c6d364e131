"""What Triton needs of a machine with a GPU is said in one line."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagemesh.engine.cuda import opening
from pagemesh.engine.cuda.toolchain import cache_folder, check_toolchain
from pagemesh.kernels.layout import PageLayout
from pagemesh.wire.errors import ConfigError


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One that has all of it."""
    for name in ("CC", "TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda **_: {"include": str(tmp_path)})
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/gcc" if name == "gcc" else None)
    return tmp_path


def test_a_compiler_and_a_folder_that_can_be_made_are_enough(machine: Path) -> None:
    told = check_toolchain()
    assert told == f"/bin/gcc, kernels are kept in {machine / '.triton' / 'cache'}"
    assert list(machine.iterdir()) == [machine / "Python.h"], "nothing was made"


def test_a_machine_without_a_compiler_is_told_which(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(ConfigError, match="no gcc or clang; install gcc"):
        check_toolchain()
    monkeypatch.setenv("CC", "mycc")
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/gcc" if name == "gcc" else None)
    with pytest.raises(ConfigError, match="there is no mycc;"):
        check_toolchain()


def test_clang_will_do(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/clang" if name == "clang" else None)
    assert check_toolchain().startswith("/bin/clang,")


def test_missing_headers_are_named(machine: Path) -> None:
    (machine / "Python.h").unlink()
    with pytest.raises(ConfigError, match=r"has no Python\.h; install them"):
        check_toolchain()


def test_a_user_without_a_home_is_told_to_name_a_folder(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = machine / "file"
    file.touch()
    monkeypatch.setenv("TRITON_HOME", str(file))
    with pytest.raises(ConfigError, match=r"file cannot be written; name .*TRITON_CACHE_DIR"):
        check_toolchain()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(machine / ("n" * 300)))
    with pytest.raises(ConfigError, match=r"\(TRITON_CACHE_DIR\): file name too long"):
        check_toolchain()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(machine / "kernels"))
    assert check_toolchain().endswith(str(machine / "kernels"))
    assert cache_folder() == machine / "kernels"


def test_what_triton_would_say_in_many_lines_a_worker_says_in_one(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Decoder:
        def warm_up(self, _pool: object) -> None:
            raise RuntimeError("Failed to find C compiler")

    given = Decoder(), SimpleNamespace(device="cpu"), PageLayout(1, 1, 16, 16)
    with pytest.raises(RuntimeError, match="Failed to find"):
        opening._compile(*given)  # type: ignore[arg-type]
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(ConfigError, match="needs a C compiler"):
        opening._compile(*given)  # type: ignore[arg-type]
