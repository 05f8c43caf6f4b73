"""What is installed and what may import what."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.project import ROOT, code_files, project_files, pyproject, report, run, source


def test_dependencies() -> None:
    settings = pyproject()
    names = [re.split(r"[^\w-]", item)[0] for item in settings["project"]["dependencies"]]
    heavy = re.compile(r"torchvision|torchaudio|rsl-rl|isaac|nvidia|cuda|cupy|jax|triton|warp")
    report(filter(heavy.search, names), "not in a default install: make it an extra")

    pinned = re.findall(r"^([\w-]+)==", source(Path("requirements-dev.txt")), re.MULTILINE)
    dev = [re.split(r"[^\w-]", item)[0] for item in settings["dependency-groups"]["dev"]]
    report({*names, *dev} - {*pinned, "torch"}, "pin it in requirements-dev.txt")
    assert "torch" not in pinned, "the Makefile pins torch"


def test_the_supervisor_loads_nothing_heavy() -> None:
    program = (
        "import sys, rallypoint.daemon.cli\n"
        "print(*{'torch', 'numpy', 'mujoco', 'matplotlib', 'fsspec'} & {*sys.modules})"
    )
    result = run(sys.executable, "-c", program)
    assert (result.returncode, result.stdout.split()) == (0, []), result.stderr


def test_the_contract_on_shared_names_every_other_part_of_the_daemon() -> None:
    contracts = {c["name"]: c for c in pyproject()["tool"]["importlinter"]["contracts"]}
    forbidden = contracts["trainer and checkpointing meet the daemon only in daemon.shared"]
    parts = {
        f"rallypoint.daemon.{path.parts[1].removesuffix('.py')}"
        for path in code_files()
        if path.parts[0] == "daemon" and path.name != "__main__.py"
    } - {"rallypoint.daemon.shared", "rallypoint.daemon.__init__"}
    report(parts - {*forbidden["forbidden_modules"]}, "add it to forbidden_modules")


def copy_project(target: Path) -> Path:
    """The project's files in another place, links as links."""
    for path in project_files():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target / path, follow_symlinks=False)
    return target


def lint_imports(project: Path) -> subprocess.CompletedProcess[str]:
    """import-linter on that copy of the project, whatever is installed."""
    program = (
        f"import sys; sys.path.insert(0, {str(project / 'src')!r})\n"
        "from importlinter.cli import lint_imports\n"
        "sys.exit(lint_imports(no_cache=True))"
    )
    return run(sys.executable, "-c", program, cwd=project)


@pytest.mark.slow
def test_import_contracts_hold_and_can_fail(tmp_path: Path) -> None:
    assert (held := lint_imports(ROOT)).returncode == 0, held.stdout + held.stderr

    project = copy_project(tmp_path)
    for module, line in {
        "daemon/core/records.py": "import torch, time",
        "daemon/shared/plan.py": "import rallypoint.ops",
        "checkpointing/__init__.py": "import rallypoint.trainer",
    }.items():
        with (project / module).open("a") as file:
            file.write(f"\n{line}\n")
    broken = lint_imports(project)
    assert broken.returncode == 1, broken.stdout + broken.stderr
    for contract in pyproject()["tool"]["importlinter"]["contracts"]:
        assert f"{contract['name']} BROKEN" in " ".join(broken.stdout.split())


@pytest.mark.slow
def test_the_wheel_has_every_module(tmp_path: Path) -> None:
    project = copy_project(tmp_path / "project")
    built = run(
        *(sys.executable, "-m", "pip", "wheel", ".", "--quiet", "--no-deps", "--no-index"),
        *("--no-build-isolation", "--wheel-dir", str(tmp_path)),
        cwd=project,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("rallypoint-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    rules = (path for path in project_files() if path.match("ops/prometheus/*.yml"))
    expected = {f"rallypoint/{path}" for path in (*code_files(), *rules)}
    assert expected | {"rallypoint/__init__.py", "rallypoint/py.typed"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
