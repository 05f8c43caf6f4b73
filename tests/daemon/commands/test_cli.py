"""The command line: exit codes, messages, and what is loaded when."""

import io
import json
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rallypoint import __version__
from rallypoint.daemon import cli
from rallypoint.daemon.commands import progress
from rallypoint.daemon.executors.dirlock import DirectoryLock
from rallypoint.daemon.shared.collectives import TABLE
from rallypoint.daemon.shared.profiles import PROFILES
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.daemon.shared.tasks import TASK_OVERRIDES

Captured = pytest.CaptureFixture[str]


def run(directory: Path, *options: str) -> int:
    return cli.main(["run", "--dir", str(directory), "--metrics-port", "0", *options])


def error(capsys: Captured) -> str:
    """The one line that was printed to stderr."""
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("rallypoint: ")
    return line


def test_help_lists_every_command(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("run", "status", "stop", "drain", "config", "eval"))
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"rallypoint {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["explode"], ["run", "--explode"], ["status"]])
def test_wrong_usage_exits_2(arguments: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1), error
    assert error.startswith("rallypoint: ")
    assert error.endswith(" --help`\n")


def test_config_prints_toml_with_the_source_of_each_value(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[job]\nseed = 7\n")
    monkeypatch.setenv("RALLYPOINT_PPO__EPOCHS", "2")
    assert cli.main(["config", str(file), "--workers", "3", "--set", "ppo.gamma=0.9"]) == 0
    text = capsys.readouterr().out
    printed = tomllib.loads(text)
    assert printed["job"]["seed"] == 7
    assert (printed["node"]["workers"], printed["ppo"]["gamma"]) == (3, 0.9)
    lines = {line.split(" = ")[0]: line for line in text.splitlines() if " = " in line}
    assert lines["seed"].endswith(f"# {file}")
    assert lines["workers"].endswith("# --workers")
    assert lines["gamma"].endswith("# --set")
    assert lines["epochs"].endswith("# environment variable RALLYPOINT_PPO__EPOCHS")
    assert lines["hidden"].endswith(
        "# task quadruped-velocity (profile sonic: [2048, 2048, 1024, 1024, 512, 512])"
    )
    assert lines["iterations"].endswith("# task quadruped-velocity")
    assert lines["lam"].endswith("# default")
    assert "# group_init_s" in text


@pytest.mark.slow
@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_config_prints_the_values_of_a_profile_with_their_source(
    profile: str, capsys: Captured
) -> None:
    assert cli.main(["config", "--profile", profile]) == 0
    lines = capsys.readouterr().out.splitlines()
    printed = dict(
        re.findall(r"^(?:# )?(\w+) = .*  # (.+)$", line)[0] for line in lines if " = " in line
    )
    overrides = TASK_OVERRIDES["quadruped-velocity"]
    assert printed["profile"] == "--profile"
    for path in PROFILES[profile]:
        source = printed[path.partition(".")[2]]
        if path in overrides:
            assert source.startswith(f"task quadruped-velocity (profile {profile}: ")
        else:
            assert source == f"profile {profile}"
    assert printed["gamma"] == "default"


def test_config_prints_the_collectives_with_their_bytes(capsys: Captured) -> None:
    job = ["--workers", "3", "--set", "env.task=pointmass", "--set", "ppo.dtype=float64"]
    assert cli.main(["config", "--collectives", *job]) == 0
    text = capsys.readouterr().out
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert all(entry.name in lines for entry in TABLE)
    assert re.search(r"all-gather +int64 +24 +72 ", lines["who_is_where"])
    assert re.search(r"mean +float64 +([\d,]+) +\1 ", lines["gradients"])
    assert "3 workers, 20 mini-batches" in text
    assert "an iteration: 43 collectives" in text


def test_config_prints_the_collectives_of_exact_mode(capsys: Captured) -> None:
    """Of the blocks that a rank brings: 6 over 2 workers."""
    settings = ["env.task=pointmass", "ppo.reduction=ordered", "env.budget=global"]
    settings += ["env.num_envs=48", "env.backup=node"]
    given = [word for setting in settings for word in ("--set", setting)]
    assert cli.main(["config", "--collectives", "--workers", "2", *given]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "gradients" not in lines
    assert re.search(r"all-gather +int64 +24 +48 ", lines["blocks"])
    assert re.search(r"all-gather +float64 +72 +144 ", lines["mini_batch"])
    assert re.search(r"all-gather +float32 +[\d,]+ +[\d,]+ ", lines["block_gradients"])
    assert re.search(r"all-gather +uint8 +12 +24 ", lines["rows_wanted"])


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--set", "ppo.gama=1"], ["'ppo.gama'", "'ppo.gamma'"]),
        (["--set", "env.block=12"], ["env.block = 12"]),
        (["--workers", "x"], ["node.workers = 'x'", "--workers", "an integer"]),
        (["missing.toml"], ["missing.toml", "No such file"]),
    ],
)
def test_a_bad_configuration_exits_2_in_one_line_and_touches_nothing(
    tmp_path: Path, capsys: Captured, options: list[str], parts: list[str]
) -> None:
    assert run(tmp_path / "run", *options) == 2
    line = error(capsys)
    assert all(part in line for part in parts)
    assert not (tmp_path / "run").exists()


GLOBAL = ("--set", "env.budget=global")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--set", "ppo.mini_batches=3"], ["env.block = 8", "ppo.mini_batches = 3"]),
        (["--set", "env.block=12"], ["env.block = 12", "ppo.mini_batches = 4"]),
        (["--set", "env.num_envs=20"], ["env.num_envs = 20", "env.block = 8", "16 or 24"]),
        (["--set", "env.num_envs=4"], ["env.num_envs = 4", "env.block = 8"]),
        (["--set", "ppo.micro_batches=3"], ["ppo.micro_batches = 3", "= 2"]),
        ([*GLOBAL, "--set", "env.num_envs=20"], ["env.num_envs = 20", "16 or 24"]),
        ([*GLOBAL, "--set", "env.num_envs=16", "--workers", "3"], ["16 envs over 3 ranks"]),
        (
            [*GLOBAL, "--set", "env.num_envs=40", "--set", "job.max_workers=6"],
            ["40 envs over 6 ranks"],
        ),
        (
            [*GLOBAL, "--set", "env.max_envs=16", "--workers", "4"],
            ["at world size 4, the greatest", "32 envs", "env.max_envs = 16", "more workers"],
        ),
        (["--set", "env.max_envs=64"], ["128 envs", "env.max_envs = 64"]),
        (["--set", "job.min_workers=3"], ["job.min_workers = 3", "2"]),
        (["--set", "job.min_workers=0"], ["job.min_workers = 0"]),
        (["--set", "job.spares=-1"], ["job.spares = -1"]),
    ],
    ids=lambda value: " ".join(value).replace("--set ", "") if "--set" in value else "",
)
def test_numeric_32_what_cannot_be_divided_exits_2_with_the_values_before_anything_starts(
    tmp_path: Path, capsys: Captured, options: list[str], parts: list[str]
) -> None:
    assert run(tmp_path / "run", *options) == 2
    line = error(capsys)
    assert [part for part in parts if part not in line] == [], line
    assert not (tmp_path / "run").exists()


def test_a_second_supervisor_exits_2(tmp_path: Path, capsys: Captured) -> None:
    with DirectoryLock(RunDir(tmp_path)):
        assert run(tmp_path) == 2
    line = error(capsys)
    assert "another supervisor (pid " in line
    assert str(tmp_path) in line


def test_a_taken_port_exits_2_before_any_worker(tmp_path: Path, capsys: Captured) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run(tmp_path, "--metrics-port", str(taken.getsockname()[1])) == 2
    assert "the port is in use" in error(capsys)
    assert not (tmp_path / "logs").exists()


def test_a_directory_that_is_none_exits_2(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file" / "run") == 2
    assert "cannot be written" in error(capsys)


def test_a_damaged_state_exits_2_and_stays(tmp_path: Path, capsys: Captured) -> None:
    RunDir(tmp_path).state.write_text("{")
    assert run(tmp_path) == 2
    assert "damaged" in error(capsys)
    assert RunDir(tmp_path).state.read_text() == "{"


def test_fresh_on_a_used_directory_exits_2(tmp_path: Path, capsys: Captured) -> None:
    RunDir(tmp_path).state.write_text("{}")
    assert run(tmp_path, "--fresh") == 2
    assert "--fresh" in error(capsys)


@pytest.mark.parametrize("command", ["status", "stop", "drain"])
def test_nobody_there_exits_3(tmp_path: Path, capsys: Captured, command: str) -> None:
    assert cli.main([command, "--dir", str(tmp_path)]) == 3
    assert "no supervisor answers" in error(capsys)


@pytest.mark.slow
def test_only_the_command_that_is_asked_for_is_loaded() -> None:
    code = (
        "import sys; from rallypoint.daemon import cli\n"
        "cli.main(['status', '--dir', '/nonexistent'])\n"
        "print([n for n in ('asyncio', 'structlog', 'rich', 'torch', 'prometheus_client')"
        " if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


STATUS = {
    "state": "running",
    "iteration": 12,
    "generation": 3,
    "world_size": 2,
    "last_change": {"cause": "worker_lost", "seconds": {"total": 0.25}},
    "workers": [{"state": "warming"}, {"state": "starting"}],
}


def test_the_progress_line_says_what_matters() -> None:
    line = progress.describe(STATUS, {"episode_return_mean": 1.5}, 3456.7, 400)
    assert line == (
        "iteration 12/400 | return 1.50 | 3,457 env-steps/s | world size 2, generation 3 | "
        "last recovery 0.25 s (worker_lost)"
    )
    assert progress.describe(
        {**STATUS, "generation": None, "state": "starting"}, {}, None, None
    ) == ("starting: warming, starting")
    holding = progress.describe({**STATUS, "state": "holding"}, {}, None, None)
    assert holding.startswith("iteration 12 | return - | - env-steps/s")
    assert holding.endswith("holding")


def test_other_text_is_written_above_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    terminal = io.StringIO()
    live = progress.LiveLine(terminal)
    live.show("iteration 1 | return 2")
    live.write("a log line\n")
    live.show("")
    clear = "\r\x1b[2K"
    assert terminal.getvalue() == (f"{clear}iteration 1{clear}a log line\niteration 1{clear}")


def test_the_pace_is_of_the_last_seconds_and_begins_anew_after_a_restore() -> None:
    pace = progress.Pace()
    assert pace.take(0.0, 0) is None
    assert pace.take(1.0, 100) == 100
    assert pace.take(20.0, 2000) == pytest.approx(100, rel=0.1)
    assert pace.take(21.0, 50) is None
    assert pace.take(22.0, 70) == 20


def test_config_as_json_has_values_sources_and_timeouts(capsys: Captured) -> None:
    assert cli.main(["config", "--set", "job.seed=7", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["values"]["job"]["seed"] == {"value": 7, "source": "--set"}
    assert document["timeouts"]["detect_s"] == 5.0
    assert len(document["hash"]) > 8


def test_a_file_that_is_none_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "journal.jsonl").mkdir()
    assert cli.main(["events", "--dir", str(tmp_path)]) == 1
    assert error(capsys).endswith(
        "journal.jsonl: Is a directory; look at the path and its permissions"
    )


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text("")
    code = "import sys; from rallypoint.daemon.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "config"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
