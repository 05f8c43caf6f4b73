"""What holds for every command: machine-readable output, and errors of one line with the remedy."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.daemon.cli import full_parser, main

NO_JSON = {
    "run": "it is the supervisor: JSON lines go to stderr with log.format = 'json'",
    "completion": "it prints a shell script",
    "service": "for the unit alone; it prints nothing",
}
TO_A_SUPERVISOR = (
    *(("status",), ("status", "--json"), ("status", "--watch"), ("stop",), ("drain",), ("detach",)),
    *(("pause",), ("resume",), ("scale", "--workers", "2"), ("simulate-notice", "--in-s", "5")),
    *(("quarantine", "list"), ("quarantine", "clear")),
)

CHECKPOINT_REMEDY = (
    "give a checkpoint (a directory with manifest.json), a directory of checkpoints, or the"
)
OF_A_CHECKPOINT = (
    *(("checkpoints", action) for action in ("list", "verify", "inspect", "prune", "copy")),
    *(("eval",), ("export",), ("play",)),
)
WRONG: dict[str, tuple[int, str]] = {
    # command ({gone}: nothing is there; {file}: a text file; {empty}: a directory): exit code, what is said
    **{
        f"{' '.join(words)} {place}{' {gone}' if words[-1] == 'copy' else ''}": (
            1,
            f"{place}: {'a file' if place == '{file}' else 'no committed checkpoint'}; {CHECKPOINT_REMEDY}",
        )
        for words in OF_A_CHECKPOINT
        for place in ("{gone}", "{file}")
    },
    "checkpoints verify {empty}": (1, "{empty}: no committed checkpoint; give a checkpoint"),
    "checkpoints list nope://b/x": (2, "'nope://b/x' is not supported; give a local directory"),
    "checkpoints list memory://gone": (1, "memory://gone: no committed checkpoint; give a"),
    "checkpoints list s3://b/x --credentials-file {gone}": (
        1,
        "look at checkpoint.credentials_file",
    ),
    "checkpoints nope": (2, "(choose from 'list', 'verify'"),
    "reproduce {gone}": (1, "{gone}: cannot be read: No such file or directory; give a run's"),
    "reproduce {empty}": (
        1,
        "{empty}/journal.jsonl: cannot be read: No such file or directory; give",
    ),
    "reproduce {file}": (
        1,
        "{file}: no line of the journal has the configuration of the job; give",
    ),
    "import {gone}": (1, "{gone}: cannot be read: No such file or directory; give the .pt file"),
    "import {file}": (1, "{file}: not a file of tensors, numbers and text alone"),
    "env check nope": (2, "env.backend = 'nope' does not exist; choose one of 'embedded'"),
    "env check embedded --task nope": (
        1,
        "env.task = 'nope' does not exist in the embedded backend",
    ),
    "env check nope_none:Env": (1, "No module named 'nope_none'; give module:factory"),
    "events --dir {gone}": (2, "{gone}/journal.jsonl: there is no journal; --dir must be"),
    "events --dir {file}": (2, "{file}/journal.jsonl: there is no journal; --dir must be"),
    "events --dir {gone} --last x": (
        2,
        "--last: invalid int value: 'x'; see `rallypoint events --help`",
    ),
    "dashboard export --output {file}": (
        2,
        "--output {file}: cannot be made (File exists); give a dir",
    ),
    "dashboard preview --prometheus nope --output {gone}": (
        1,
        "give one like http://127.0.0.1:9090",
    ),
    "dashboard preview --prometheus http://127.0.0.1:1 --output {gone}": (1, "is this the address"),
    "dashboard preview --prometheus http://h --output {gone} --only nope": (
        2,
        "there are fleet, job,",
    ),
    "dashboard preview --dir {gone} --output {gone}": (3, "no supervisor answers in {gone}"),
    "simulate --seeds 0": (2, "--seeds, --jobs and --nodes must be at least 1"),
    "simulate --faults nope": (2, "--faults nope: none of worker_killed"),
    "bench nope": (2, "(choose from 'recovery', 'throughput'"),
    "bench recovery --kills 0": (2, "at least 2 workers (somebody must survive) and 1 kill"),
    "bench checkpoint --size x": (2, "--size 'x': a number and KB, MB or GB, such as 100MB"),
    "config {gone}": (
        2,
        "{gone}: cannot be read: No such file or directory; give the job's TOML file",
    ),
    "config {empty}": (2, "{empty}: cannot be read: Is a directory; give the job's TOML file"),
    "config {file}": (2, "{file}: not valid TOML: Expected '='"),
    "config --set job.nmae=x": (2, "did you mean 'job.name'?"),
    "config --nope": (2, "unrecognized arguments: --nope; see `rallypoint config --help`"),
    "doctor {gone}": (
        2,
        "{gone}: cannot be read: No such file or directory; give the job's TOML file",
    ),
    "doctor --only nope": (2, "no check is named 'nope'; there are disk, limits"),
    "nope": (2, "invalid choice: 'nope' (choose from 'run', 'status'"),
}


def commands(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, set[str]]]:
    """Each command, and its options."""
    nested = [x for x in parser._actions if isinstance(x, argparse._SubParsersAction)]
    for action in nested:
        for word, below in action.choices.items():
            yield from commands(below, f"{name} {word}".strip())
    if not nested:
        yield name, {option for action in parser._actions for option in action.option_strings}


@pytest.mark.slow
def test_every_command_can_speak_json() -> None:
    without = {name for name, options in commands(full_parser()) if "--json" not in options}
    assert without == set(NO_JSON)


@pytest.mark.slow
@pytest.mark.parametrize("command", TO_A_SUPERVISOR, ids=" ".join)
def test_without_a_supervisor_one_line_says_what_to_do(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--dir", str(tmp_path)]) == 3
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert error.startswith(f"rallypoint: no supervisor answers in {tmp_path}")
    assert error.endswith("look at --dir, or start one with `rallypoint run`\n")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "config"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("a = [", "not valid TOML"),
        ('[metrics]\ncert_file = "c"\n', "go together: set both, or neither"),
        ('[metrics]\nclient_ca_file = "c"\n', "needs TLS: set metrics.cert_file"),
        ('[metrics]\nbind = "0.0.0.0"\nusers_file = "u"\n', "would send passwords in clear"),
        ("[metrics]\nprot = 9105\n", "metrics.port"),
    ],
)
def test_a_bad_job_file_is_refused_in_one_line(
    command: str, text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    if text is not None:
        path.write_text(text)
    assert main([command, str(path)]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert error.startswith("rallypoint: ")
    assert said in error


@pytest.mark.slow
def test_a_bad_file_of_metrics_ends_a_run_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    users = tmp_path / "users"
    users.write_text("alice:secret\n")
    directory = tmp_path / "run"
    settings = ("--metrics-port", "0", "--set", f"metrics.users_file={users}")
    assert main(["run", "--dir", str(directory), *settings]) == 2
    _, error = capsys.readouterr()
    assert error.count("\n") == 1
    assert "line 1: expected NAME:HASH with a bcrypt hash; make one with `htpasswd -nB" in error
    assert "secret" not in error
    assert not (directory / "workers.json").exists()


def called(arguments: list[str]) -> int:
    """The exit code, also where argparse exits itself."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.slow
@pytest.mark.parametrize("command", WRONG)
def test_what_cannot_be_done_is_said_in_one_line_with_the_remedy(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {name: str(tmp_path / name) for name in ("gone", "file", "empty")}
    (tmp_path / "file").write_text("hello\n")
    (tmp_path / "empty").mkdir()
    code, said = WRONG[command]
    assert called(command.format(**places).split()) == code
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1, error
    assert error.startswith("rallypoint: ")
    assert said.format(**places) in error
    assert {path.name for path in tmp_path.iterdir()} == {"file", "empty"}, "nothing was touched"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "package", "said"),
    [
        ("checkpoints list s3://b/x", "s3fs", "pip install 'rallypoint[s3]'"),
        (
            "env check gymnasium --task CartPole-v1",
            "gymnasium",
            'pip install "rallypoint[gymnasium]"',
        ),
        ("env check mjlab --task x", "mjlab", "install rallypoint[mjlab]"),
    ],
)
def test_an_extra_that_is_not_installed_is_named(
    command: str,
    package: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # what an import meets where it is missing
    assert called(command.split()) in (1, 2)
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1), error
    assert said in error
