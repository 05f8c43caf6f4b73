"""The documentation is built with warnings as errors, whatever pages there are."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project import ROOT, project_files, run

pytestmark = pytest.mark.slow


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """What ``make docs`` does."""
    return run(
        *(sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"),
        *("-b", "html", "-c", "docs", ".", str(target)),
        cwd=source,
    )


def test_the_documentation_is_built_without_a_warning(tmp_path: Path) -> None:
    built = build(ROOT, tmp_path / "site")
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    pages = [p for p in project_files() if p.suffix == ".md" and p.parts[0] == "docs"]
    assert pages
    contents = (tmp_path / "site/docs/README.html").read_text(encoding="utf-8")
    for page in pages:
        assert (tmp_path / "site" / page).with_suffix(".html").is_file()
        name = page.relative_to("docs").with_suffix(".html").as_posix()
        assert page == Path("docs/README.md") or f'href="{name}"' in contents


def test_a_new_page_is_taken_in_and_one_that_is_wrong_is_refused(tmp_path: Path) -> None:
    docs, page = tmp_path / "docs", tmp_path / "docs/runbooks/new.md"
    page.parent.mkdir(parents=True)
    shutil.copy2(ROOT / "docs/conf.py", docs)
    (docs / "README.md").write_text("# Documentation\n")
    page.write_text("# New\n\nSee [the first](../README.md#documentation).\n")
    built = build(tmp_path, tmp_path / "site")
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    assert 'href="runbooks/new.html"' in (tmp_path / "site/docs/README.html").read_text()

    page.write_text("# New\n\n[Gone](../gone.md), [nowhere](../README.md#no-such-heading)\n")
    refused = build(tmp_path, tmp_path / "site")
    assert refused.returncode != 0
    assert "gone.md" in refused.stderr
    assert "no-such-heading" in refused.stderr
