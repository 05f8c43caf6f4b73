"""The reference pages say what the code says, and every command and exit code is in the documents."""

import re
from pathlib import Path

import pytest

from rallypoint.daemon import cli
from rallypoint.daemon.executors.metrictable import TABLE
from rallypoint.daemon.shared import configload, timeouts
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.figures import FIGURES, FOLDERS
from rallypoint.ops import docs
from tests.fakes.training import config, train
from tests.project import ROOT, pyproject, source


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
