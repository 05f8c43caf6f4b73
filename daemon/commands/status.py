"""``rallypoint status``: what a running supervisor knows, as text, as JSON, or as a live table."""

import argparse
import json
import time
from typing import Any, Final

from rallypoint.daemon.commands.client import AdminClient, add_dir
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.daemon.shared.stages import read_stage

_REFRESH_S: Final = 1.0


class StatusCommand:
    """Asks the supervisor of a directory. Exit code 3 when none answers."""

    help: Final = "show the state of a run"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        add_dir(parser)
        how = parser.add_mutually_exclusive_group()
        how.add_argument("--json", action="store_true", help="one JSON document, for scripts")
        how.add_argument("--watch", action="store_true", help="a live picture, until interrupted")

    def run(self, args: argparse.Namespace) -> int:
        """Print; exit code 0."""
        with AdminClient(args.dir) as client:
            if args.watch:
                return _watch(client, RunDir(args.dir))
            document = client.ask(command="status")["status"]
        if args.json:
            print(json.dumps(document))
        else:
            _print(document, RunDir(args.dir))
        return 0


def _print(status: dict[str, Any], rundir: RunDir) -> None:
    from rich.console import Console

    Console().print(_table(status, rundir))


def _watch(client: AdminClient, rundir: RunDir) -> int:
    """Until interrupted. Where nobody looks (no terminal) one picture is printed."""
    from rich.console import Console
    from rich.live import Live

    from rallypoint.daemon.commands.watch import render

    def picture() -> Any:
        status = client.ask(command="status")["status"]
        lines = [*summary(status), *stages(rundir, status)]
        return render(rundir, status, lines, time.time())

    if not Console().is_terminal:
        Console().print(picture())
        return 0
    with Live(auto_refresh=False) as live:
        try:
            while True:
                live.update(picture(), refresh=True)
                time.sleep(_REFRESH_S)
        except KeyboardInterrupt:
            return 0


def _table(status: dict[str, Any], rundir: RunDir) -> Any:
    """A rich renderable; rich is loaded only by those who look."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    workers = Table("worker", "pid", "rank", "state", "committed", "envs", "life")
    for worker in status["workers"]:
        row = (f"{worker['node']}/{worker['slot']}", *(_text(worker[k]) for k in _COLUMNS))
        workers.add_row(*row)
    lines = [*summary(status), *stages(rundir, status)]
    return Group(*(Text(line) for line in lines), workers)


_COLUMNS: Final = ("pid", "rank", "state", "committed_iteration", "num_envs", "incarnation")


def summary(status: dict[str, Any]) -> list[str]:
    """The run in a few lines."""
    change, checkpoint = status["last_change"], status["checkpoint"]
    run = (
        f"job {status['job']}: {status['state']}, generation {_text(status['generation'])}, world "
        f"size {_text(status['world_size'])}, iteration {_text(status['iteration'])}, "
        f"{_text(status['env_steps'])} env steps, {_text(status['num_envs'])} envs"
    )
    because = [] if status["reason"] is None else [f"{status['state']}: {status['reason']}"]
    lines = [run, *because, f"metrics {_text(status['metrics_url'])}"]
    if change["generation"] is not None:
        total = change["seconds"]["total"]
        took = "" if total is None else f" in {total:.2f} s"
        lines.append(
            f"last change: {change['kind']} ({change['cause']}), generation "
            f"{change['generation']}{took}"
        )
    if checkpoint["iteration"] is not None:
        lines.append(
            f"checkpoint: iteration {checkpoint['iteration']}, {checkpoint['age_seconds']:.0f} s old, "
            f"{checkpoint['path']}"
        )
    return lines


def stages(rundir: RunDir, status: dict[str, Any]) -> list[str]:
    """What workers of this node are building, a line each; others are seen on their own nodes."""
    local = (worker for worker in status["workers"] if worker["pid"] is not None)
    said = {
        f"{w['node']}/{w['slot']}": read_stage(rundir.stage(w["slot"]), w["incarnation"])
        for w in local
    }
    return [f"{name}: {stage}" for name, stage in said.items() if stage]


def _text(value: object) -> str:
    return "-" if value is None else str(value)


COMMAND = StatusCommand()
