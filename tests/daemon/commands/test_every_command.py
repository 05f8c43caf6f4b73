"""What holds for every command: machine-readable output, and errors of one line with the remedy."""

import argparse
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
