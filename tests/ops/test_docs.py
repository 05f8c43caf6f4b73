"""The reference pages say what the code says, every command and exit code is in the documents, and all
pages are built with warnings as errors."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.daemon import cli
from rallypoint.daemon.commands.client import EXIT_NO_SUPERVISOR
from rallypoint.daemon.core.ending import EXIT_NOTICE
from rallypoint.daemon.executors import logevents
from rallypoint.daemon.executors.metrictable import TABLE
from rallypoint.daemon.shared import configload, exitcodes, timeouts
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.figures import FIGURES, FOLDERS
from rallypoint.ops import docs, logsites
from tests.fakes.training import config, train
from tests.project import ROOT, code_files, project_files, pyproject, run, source


@pytest.mark.parametrize("name", sorted(docs.pages()))
def test_a_reference_page_is_what_the_code_says(name: str) -> None:
    written = (docs.FOLDER / name).read_text(encoding="utf-8")
    assert written == docs.pages()[name], "run: python -m rallypoint.ops.docs"


def test_pages_are_written_where_they_are_read(tmp_path: Path) -> None:
    assert docs.FOLDER == ROOT / "docs"
    docs.write(tmp_path, docs.pages())
    assert {path.name for path in tmp_path.iterdir()} == set(docs.pages())


def test_every_metric_and_label_value_is_documented() -> None:
    text = docs.metrics_page()
    for spec in TABLE:
        assert f"`rallypoint_{spec.name}`" in text
        for values in spec.labels.values():
            assert ", ".join(values) in text


def test_every_configuration_key_is_documented_with_its_meaning() -> None:
    rows = dict(
        re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \| .* \| (.+) \|$", _configuration(), re.MULTILINE)
    )
    assert list(rows) == [path for path, _ in configload.items(Config())]
    assert all(rows.values())


def test_every_derived_timeout_is_documented() -> None:
    names = list(docs.docstrings(timeouts.Timeouts))
    assert all(f"| `{name}` |" in _configuration() for name in names)
    # | `group_init_s` | max(1, d/5) + 0.02·W | 1.06 s | …
    rows = re.findall(
        r"^\| `(\w+_s)` \| .+? \| ([\d.]+) s \|", source(Path("ARCHITECTURE.md")), re.MULTILINE
    )
    derived = timeouts.derive(Config(), world_size=3)
    expected = {name: getattr(derived, name) for name in names if name != "detect_s"}
    assert {name: float(value) for name, value in rows} == pytest.approx(expected)


def test_every_command_has_a_section() -> None:
    page = source(Path("docs/cli.md"))
    sections = set(re.findall(r"^## `rallypoint ([a-z-]+)", page, re.MULTILINE))
    external = pyproject()["project"]["entry-points"]["rallypoint.commands"]
    assert sections == {*external, *cli._COMMANDS}


def test_every_exit_code_is_documented() -> None:
    page = source(Path("docs/cli.md"))
    ours = {0, 1, 2, EXIT_NO_SUPERVISOR, EXIT_NOTICE, cli._EXIT_INTERRUPTED}
    rows = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert rows == ours
    (sentence,) = re.findall(
        r"^A worker process has its own: (.*?)\.\s", page, re.MULTILINE | re.DOTALL
    )
    of_workers = {value for name, value in vars(exitcodes).items() if name.startswith("EXIT_")}
    assert {int(code) for code in re.findall(r"\b\d+\b", sentence)} == {0, *of_workers}


def _configuration() -> str:
    return docs.configuration_page()


def test_every_figure_of_a_real_iteration_is_documented() -> None:
    (worker,) = train(config(epochs=1), [range(2)], 12)
    figures = {name for iteration in worker.history for name in iteration}
    known = {figure.name for figure in FIGURES}
    unknown = {name for name in figures if not name.startswith(tuple(FOLDERS))} - known
    assert not unknown
    # The converse: a figure that no job has is none. Those left out are of the session, and of losses
    # that this job does not have.
    others = {
        "rollout_s",
        "update_s",
        "straggler_ratio",
        *(name for name in known if name.startswith("aux_")),
    }
    assert known - others <= figures


# --- blocks of code ---------------------------------------------------------------------------


def blocks(*kinds: str) -> Iterator[tuple[str, str]]:
    """Page and text of each block of code of these kinds, in all documents."""
    for path in project_files():
        if path.suffix == ".md":
            found = re.finditer(r"^```(\w+)\n(.*?)^```$", source(path), re.MULTILINE | re.DOTALL)
            yield from ((str(path), m[2]) for m in found if m[1] in kinds)


def test_every_configuration_that_is_shown_is_valid(tmp_path: Path) -> None:
    shown = list(blocks("toml"))
    assert {page for page, _ in shown} >= {"README.md", "docs/spot-clusters.md"}
    for page, text in shown:
        file = tmp_path / "job.toml"
        file.write_text(text)
        try:  # with the name that each node of a cluster gets from its environment
            configload.load(file, environ={"RALLYPOINT_NODE__NAME": "a"})
        except ConfigError as error:
            pytest.fail(f"{page}: {error}")


def test_every_command_that_is_shown_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    parser, count = cli.full_parser(), 0
    for page, text in blocks("sh", "bash"):
        redirected = text.replace("\\\n", " ")
        lines = re.sub(r"\s\d?>>?\s*&?[^\s;|)]+", "", redirected).splitlines()
        for command in (m[1] for x in lines for m in [_COMMAND.search(x)] if m is not None):
            words = shlex.split(command.strip(), comments=True)
            try:
                parser.parse_args(words)
            except SystemExit:
                pytest.fail(f"{page}: rallypoint {command}: {capsys.readouterr().err}")
            count += 1
    assert count > 20


_COMMAND = re.compile(r"""(?:^|[\s"(/])rallypoint ((?:"[^"]*"|'[^']*'|[^|&;)>#"'])+)""")


# --- the list of log events ----------------------------------------------------------------------


def listed_events() -> list[str]:
    return [name for events in logevents.EVENTS.values() for name in events]


def test_every_event_that_is_logged_is_listed_and_every_listed_one_is_logged() -> None:
    logged = {site.event for site in logsites.sites() if site.event is not None}
    assert logged - {*listed_events()} == set(), (
        "say in daemon/executors/logevents.py what it means"
    )
    assert {*listed_events()} - logged == set(), "nothing logs it: take it from the list"
    assert len(listed_events()) == len({*listed_events()}), "one name, one place in the list"


def test_no_event_is_logged_under_a_name_that_the_list_cannot_be_held_against() -> None:
    """Names that are passed on come from decisions, where they are literal."""
    passed = {site.where.partition(":")[0] for site in logsites.sites() if site.event is None}
    assert passed == {"core/changes.py", "core/leader.py", "executors/perform.py"}
    loggers = [p for p in code_files() if "structlog.get_logger" in source(p)]
    strange = [p for p in loggers if p.parts[0] != "daemon" or "_log = structlog" not in source(p)]
    assert not strange, "the list is made of what `_log` of the daemon's modules is given"


def test_no_field_hides_a_fact_that_every_line_has() -> None:
    hidden = [site for site in logsites.sites() if {*site.fields} & {*logevents.BOUND}]
    assert not hidden
    assert all(meaning.endswith(".") for e in logevents.EVENTS.values() for meaning in e.values())


# --- the pages are built -------------------------------------------------------------------------


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """What ``make docs`` does."""
    return run(
        *(sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"),
        *("-b", "html", "-c", "docs", ".", str(target)),
        cwd=source,
    )


@pytest.mark.slow
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


@pytest.mark.slow
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
