"""What keeps the repository readable, watched by a test."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from pagemesh.cli.main import cli

ROOT = Path(__file__).parent.parent
SOURCES = ("services", "shared", "kernels", "tests", "ops")
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 12

FORBIDDEN = {
    "a machine's own path": r"/(home|root|work|Users)/[a-z]",
    "a reference to an issue": r"(?<![\w&#])#\d+\b|\b(issue|ticket|PR) #?\d+\b",
    "a leftover": r"\b(XXX|FIXME|TODO|HACK)\b",
    "how it was written": r"\b(Claude|Copilot|ChatGPT|AI[- ](generated|assistant|session))\b",
    "a package registry": r"\b(pypi\.org|files\.pythonhosted\.org|registry\.npmjs\.org)\b",
    "a merge conflict": r"^(<{7}|>{7}) ",
}
FORBIDDEN_EXEMPT = {"tests/test_tidy.py", "LICENSE"}
# Units and qualifiers come last: ms_timeout, max_pages and n_rows say it the wrong way round.
UNITS = frozenset({"ms", "us", "ns", "bytes"})
QUALIFIERS = frozenset({"max", "min", "n", "num"})
FIRST_ALLOWED = frozenset({"max_tokens", "min_tokens", "min_p", "max_completion_tokens"})
NAMED_BY_OTHERS = ("openai", "client", "checkpoint")


@functools.cache
def tracked() -> tuple[Path, ...]:
    """Files under version control, or everything when there is none (an unpacked archive)."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0 and listed.stdout:
        paths = [ROOT / line for line in listed.stdout.splitlines()]
    else:
        paths = [path for folder in SOURCES for path in (ROOT / folder).rglob("*")]
    return tuple(path for path in paths if path.is_file())


def python_files() -> list[Path]:
    return [
        path
        for path in tracked()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in SOURCES
    ]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def functions(path: Path) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    return tuple(
        node
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_a_file_can_be_held_in_the_head() -> None:
    lines = {name(path): len(path.read_text().splitlines()) for path in python_files()}
    long = {path: count for path, count in lines.items() if count > FILE_LINES_MAX}
    assert not long, f"split them: {long}"


def test_a_function_fits_on_a_screen() -> None:
    long = {}
    for path in python_files():
        for function in functions(path):
            count = (function.end_lineno or function.lineno) - function.lineno + 1
            if count > FUNCTION_LINES_MAX:
                long[f"{name(path)}:{function.name}"] = count
    assert not long


def test_a_function_takes_few_parameters() -> None:
    many = {}
    for path in python_files():
        for function in functions(path):
            arguments = function.args
            count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
            if count > PARAMETERS_MAX:
                many[f"{name(path)}:{function.name}"] = count
    assert not many, f"pass a value with a name: {many}"


def test_a_module_says_what_it_is() -> None:
    silent = [
        name(path)
        for path in python_files()
        if tree(path).body and not ast.get_docstring(tree(path))
    ]
    assert not silent


def test_units_and_qualifiers_come_last() -> None:
    found = set()
    for path in python_files():
        if any(part in path.stem for part in NAMED_BY_OTHERS):
            continue
        for node in ast.walk(tree(path)):
            names = [node.arg] if isinstance(node, ast.arg) else []
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names = [node.target.id]
            found |= {f"{name(path)}:{one}" for one in names if _unit_comes_first(one)}
    assert not found


def _unit_comes_first(text: str) -> bool:
    words = text.lower().strip("_").split("_")
    has_noun = any(word not in UNITS | QUALIFIERS for word in words)
    return has_noun and words[0] in UNITS | QUALIFIERS and text not in FIRST_ALLOWED


def test_every_test_can_fail() -> None:
    """It asserts, expects a raise, or calls something of the tests, or of torch's, that does."""
    known = [
        (path, function)
        for path in python_files()
        if path.relative_to(ROOT).parts[0] == "tests"
        for function in functions(path)
    ]
    calls = [(one.name, _called(one)) for _, one in known]
    failing = {"assert_close"} | {one.name for _, one in known if _can_fail(one)}
    while more := {caller for caller, called in calls if called & failing} - failing:
        failing |= more
    idle = [
        f"{name(path)}:{one.name}"
        for path, one in known
        if path.name.startswith("test_") and one.name.startswith("test_")
        if one.name not in failing
    ]
    assert not idle


def _can_fail(function: ast.AST) -> bool:
    claims = ast.Assert | ast.Raise | ast.With | ast.AsyncWith
    return any(isinstance(node, claims) for node in ast.walk(function))


def _called(function: ast.AST) -> set[str]:
    """Names of what it calls, whosever they are."""
    called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {one.id for one in called if isinstance(one, ast.Name)} | {
        one.attr for one in called if isinstance(one, ast.Attribute)
    }


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_has_no_place_here_is_not_here(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what], re.MULTILINE)
    found = []
    for path in tracked():
        if name(path) in FORBIDDEN_EXEMPT or path.suffix in (".safetensors", ".png", ".ico"):
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{name(path)}: {match.group(0)!r}" for match in pattern.finditer(text)]
    assert not found, found[:20]


def test_no_package_marks_the_shared_namespace() -> None:
    roots = [ROOT / root / "pagemesh" / "__init__.py" for root in ("services", "shared", "kernels")]
    assert not [path for path in roots if path.exists()]


def test_every_package_says_what_it_is() -> None:
    silent = []
    for root in ("services", "shared", "kernels"):
        for folder in (ROOT / root / "pagemesh").rglob("*"):
            holds_code = (
                any(child.suffix == ".py" for child in folder.iterdir())
                if (folder.is_dir() and folder.name != "__pycache__")
                else False
            )
            marker = folder / "__init__.py"
            if holds_code and not (marker.exists() and ast.get_docstring(tree(marker))):
                silent.append(name(folder))
    assert not silent


@pytest.mark.parametrize(
    "command",
    [
        "lint-imports --no-cache",
        "ruff check --no-cache",
        "ruff format --check --no-cache",
        pytest.param("mypy", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_found_by(command: str) -> None:
    tool, *arguments = command.split()
    path = Path(sys.executable).parent / tool
    done = subprocess.run([path, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    wanted = set(re.findall(r"^(?:\$ )?make ([a-z][\w-]*)", readme_commands(), re.MULTILINE))
    assert wanted, "the README shows no make command"
    assert wanted <= targets, f"not in the Makefile: {sorted(wanted - targets)}"


def test_every_pagemesh_command_of_the_readme_exists() -> None:
    wanted = set(re.findall(r"`pagemesh ([a-z]+)", (ROOT / "README.md").read_text()))
    known = set(cli.list_commands(click.Context(cli)))
    assert wanted, "the README shows no pagemesh command"
    assert wanted <= known, f"unknown: {sorted(wanted - known)}"


def test_every_file_a_page_links_to_exists() -> None:
    pages = [path for path in tracked() if path.suffix == ".md"]
    assert ROOT / "README.md" in pages
    missing = [
        f"{name(page)}: {link}"
        for page in pages
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert not missing


def readme_commands() -> str:
    return "\n".join(
        re.findall(r"```(?:sh|bash|console)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    )
