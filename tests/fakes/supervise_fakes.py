"""``rallypoint run`` with fake workers: the same supervisor, another program in the slots."""

import argparse
import asyncio
import sys
from pathlib import Path

from rallypoint.daemon.commands import options
from rallypoint.daemon.executors import logs
from rallypoint.daemon.executors.dirlock import DirectoryLock
from rallypoint.daemon.executors.supervisor import Outcome, Supervisor
from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.rundir import RunDir


def main(worker: Path | None = None) -> int:
    """``worker``: what runs in the slots; None: what the supervisor's fork server forks."""
    parser = argparse.ArgumentParser()
    options.add_configuration(parser)
    parser.add_argument("--dir", type=Path, required=True)
    args = parser.parse_args()
    config, rundir = options.resolve(args).config, RunDir(args.dir)

    def command(key: WorkerKey) -> list[str]:
        place = ["--dir", str(rundir.path), "--node", key.node, "--slot", str(key.slot)]
        return [sys.executable, str(worker), *place, "--incarnation", str(key.incarnation)]

    with DirectoryLock(rundir):
        supervisor = Supervisor(config, rundir, worker_command=command if worker else None)
        logs.configure(config.log, supervisor.log_facts)
        outcome: Outcome = asyncio.run(supervisor.run())
    return outcome.code


if __name__ == "__main__":
    sys.exit(main(Path(__file__).with_name("fake_worker.py")))
