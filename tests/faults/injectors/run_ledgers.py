"""``rallypoint run`` as users start it, but for its workers: they keep ledgers, and a pace that leaves a
machine of two cores to all nodes of a job. No picture is drawn at the end."""

import sys
from pathlib import Path

from rallypoint.daemon import cli
from rallypoint.daemon.commands import run
from rallypoint.daemon.executors.forkserver import ForkServer

ForkServer.program = (str(Path(__file__).parents[2] / "fakes" / "ledger_worker.py"),)
run.__dict__["_draw_curve"] = lambda rundir: "-"
sys.exit(cli.main(["run", *sys.argv[1:]]))
