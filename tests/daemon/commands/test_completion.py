"""The completion script, in a real shell."""

import subprocess
from pathlib import Path

import pytest

from rallypoint.daemon.cli import full_parser, main
from rallypoint.daemon.commands.completion import SHELLS

pytestmark = [pytest.mark.slow]

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
complete -p rallypoint >/dev/null || exit 9
function=$(complete -p rallypoint | sed -E 's/.*-F ([^ ]+).*/\\1/')
"$function" rallypoint "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "rallypoint.bash"
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("builtins.print", said.append)
        assert main(["completion", "bash"]) == 0
    path.write_text("\n".join(said))
    return path


def completed(script: Path, *words: str) -> set[str]:
    done = subprocess.run(
        ["/bin/bash", "-c", ASK, "ask", str(script), "rallypoint", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stdout.split())


def test_bash_completes_commands_actions_and_options(script: Path) -> None:
    assert completed(script, "sta") == {"status"}
    assert completed(script, "s") >= {"status", "stop", "scale", "simulate", "simulate-notice"}
    assert completed(script, "quarantine", "c") == {"clear"}
    assert completed(script, "simulate-notice", "--in") == {"--in-s"}
    assert completed(script, "bench", "rec") == {"recovery"}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "simulate-notice" in text
    assert "rallypoint" in text


def test_every_command_can_be_loaded_and_has_a_line_of_help() -> None:
    text = full_parser().format_help()
    for name in ("run", "events", "eval", "bench", "checkpoints"):
        assert f"    {name}" in text
