"""``rallypoint run``: a supervisor in the foreground, with a progress line and a summary."""

import argparse
import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Final, TextIO, cast

from rallypoint.daemon.commands import options, progress, warmstart
from rallypoint.daemon.core.ending import EXIT_NOTICE
from rallypoint.daemon.executors import logs
from rallypoint.daemon.executors.dirlock import DirectoryLock
from rallypoint.daemon.executors.supervisor import Outcome, Supervisor
from rallypoint.daemon.shared.rundir import RunDir

_CURVE_TIMEOUT_S: Final = 60.0


class RunCommand:
    """The daemon and the laptop command are the same."""

    help: Final = "train: supervise the workers of this node in the foreground"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        options.add_configuration(parser)
        parser.add_argument(
            "--dir", type=Path, metavar="DIR", help="everything of the run; default runs/<job>"
        )
        parser.add_argument(
            "--fresh", action="store_true", help="refuse to resume: DIR must not hold the job yet"
        )
        parser.add_argument(
            "--warm-start",
            metavar="CHECKPOINT",
            help="begin with its parameters and observation statistics (short for job.warm_start)",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Run to the end; the exit code of the supervisor."""
        config = options.resolve(args).config
        rundir = RunDir((args.dir or Path("runs") / config.job.name).absolute())
        live = progress.LiveLine(sys.stdout) if sys.stdout.isatty() else None
        config = warmstart.prepared(config, rundir)
        with DirectoryLock(rundir):
            supervisor = Supervisor(config, rundir, fresh=args.fresh)
            shared = live is not None and sys.stderr.isatty()
            logs.configure(
                config.log, supervisor.log_facts, cast(TextIO, live) if shared else sys.stderr
            )
            outcome = asyncio.run(_supervise(supervisor, live))
        _summarise(supervisor, outcome)
        return outcome.code


async def _supervise(supervisor: Supervisor, live: progress.LiveLine | None) -> Outcome:
    shown = asyncio.create_task(progress.show(supervisor, sys.stdout, live))
    try:
        return await supervisor.run()
    finally:
        shown.cancel()
        if live is not None:
            live.show("")


def _summarise(supervisor: Supervisor, outcome: Outcome) -> None:
    status, recorder = supervisor.status(), supervisor.recorder
    if outcome.code == 1:
        print(f"rallypoint: the job failed: {outcome.reason}", file=sys.stderr)
    else:
        print(outcome.reason)
    print(f"iteration     {status['iteration']} ({status['env_steps']:,} env steps)")
    value = progress.final_return(recorder.figures)
    print(f"return        {'-' if value is None else f'{value:.2f}'}")
    if outcome.code != EXIT_NOTICE:  # there is no time for a picture
        print(f"reward curve  {_draw_curve(supervisor.rundir)}")
    print(f"checkpoint    {status['checkpoint']['path'] or '-'}")
    print(f"metrics       {status['metrics_url']} (until now)")


def _draw_curve(rundir: RunDir) -> str:
    """Path of the picture, else why there is none. Drawn by a process of its own: the supervisor
    never loads a plotting library."""
    command = [sys.executable, "-m", "rallypoint.ops.curve", str(rundir.path)]
    try:
        drawn = subprocess.run(
            command, capture_output=True, text=True, timeout=_CURVE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"- (not drawn within {_CURVE_TIMEOUT_S:g} s)"
    last = (drawn.stdout if drawn.returncode == 0 else drawn.stderr).strip().splitlines()[-1:]
    text = last[0] if last else f"exit code {drawn.returncode}"
    return text if drawn.returncode == 0 else f"- ({text})"


COMMAND = RunCommand()
