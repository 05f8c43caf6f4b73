"""The check that every test gets: no process is left behind."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.project import ROOT, run

LEAKS = """
import subprocess

def test_orphan():
    # Comes back when the child runs: in the middle of its exec it has no environment to look at.
    child = "exec >/dev/null 2>&1; kill -STOP $$"
    subprocess.run(["sh", "-c", f"setsid sh -c '{child}' &"], stdout=subprocess.PIPE, check=True)

def test_clean():
    with subprocess.Popen(["sleep", "60"]) as process:
        process.kill()
"""


@pytest.mark.slow
def test_a_process_left_behind_fails_its_test_and_is_ended(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    (tmp_path / "test_leaks.py").write_text(LEAKS)

    result = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path)

    assert "2 passed, 1 error" in result.stdout
    assert "ERROR test_leaks.py::test_orphan - Failed: left 1 process(es) behind" in result.stdout
    (pid,) = {int(pid) for pid in re.findall(r"behind: (\d+)", result.stdout)}
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    """Whether the process is there and not a zombie."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # gone
        return False
