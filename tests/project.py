"""What the project consists of, for the tests of the repository itself."""

import ast
import subprocess
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CODE_FOLDERS = ("checkpointing", "daemon", "ops", "trainer")


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A finished command, with its output."""
    return subprocess.run(
        command, check=False, cwd=cwd, capture_output=True, text=True, timeout=110
    )


@cache
def project_files() -> tuple[Path, ...]:
    """Files of the project, relative to its root: tracked, or new and not ignored."""
    listing = run(
        *("git", "-c", "safe.directory=*", "ls-files", "-z"),
        *("--cached", "--others", "--exclude-standard"),
    )
    assert listing.returncode == 0, listing.stderr
    names = filter(None, listing.stdout.split("\0"))
    return tuple(sorted(path for path in map(Path, names) if (ROOT / path).exists()))


def python_files() -> list[Path]:
    """Every Python file, tests included, but for what protobuf's compiler makes."""
    files = project_files()
    return [p for p in files if p.suffix == ".py" and not p.name.endswith("_pb2.py")]


def code_files() -> list[Path]:
    """Python files of the four code folders."""
    return [path for path in python_files() if path.parts[0] in CODE_FOLDERS]


@cache
def source(path: Path) -> str:
    """Text of a file."""
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def tree(path: Path) -> ast.Module:
    """Syntax tree of a Python file."""
    return ast.parse(source(path), str(path))


def pyproject() -> dict[str, Any]:
    """The settings of the project."""
    return tomllib.loads(source(Path("pyproject.toml")))


def report(found: Iterable[str], remedy: str) -> None:
    """Fail with every finding at once."""
    lines = sorted(found)
    assert not lines, "\n  ".join([f"{len(lines)} found; {remedy}:", *lines])
