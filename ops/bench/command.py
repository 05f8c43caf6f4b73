"""``rallypoint bench …``: measurements on this machine."""

import argparse
import itertools
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rallypoint.daemon.shared.command import Command
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.tasks import TASK_OVERRIDES
from rallypoint.ops.bench import (
    checkpoint,
    ftpeer,
    membership,
    membershipreport,
    noderecovery,
    nodereport,
    notice,
    peer,
    ppo,
    recovery,
    report,
    scaling,
    soak,
    throughput,
)
from rallypoint.ops.bench.arguments import (
    add_common,
    configure_checkpoint,
    configure_membership,
    configure_torchft,
    counts,
    seconds,
)
from rallypoint.ops.bench.job import Job
from rallypoint.ops.bench.membership import Loss
from rallypoint.ops.bench.noderecovery import NodeLoss
from rallypoint.ops.bench.notice import Noticed
from rallypoint.ops.bench.recovery import Kill
from rallypoint.ops.bench.soak import Blow
from rallypoint.ops.bench.throughput import Setting

DEFAULT = "quadruped-velocity"


@dataclass(frozen=True)
class BenchCommand:
    """Starts jobs of its own in a temporary directory, and ends them."""

    help: str = "measure recovery, throughput, scaling and endurance on this machine"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the benchmarks and their arguments."""
        benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
        text = "kill workers at random moments; time from the kill to the survivors' next step"
        kills = benchmarks.add_parser("recovery", help=text, description=text)
        kills.add_argument("--workers", type=int, default=3, metavar="N")
        text = "lose whole nodes of N, with one worker each, instead of single workers"
        kills.add_argument("--nodes", type=int, default=0, metavar="N", help=text)
        text = "with --nodes: membership.detect_s of each run (default 5,3)"
        kills.add_argument(
            "--detect-s", type=seconds, default=(5.0, 3.0), metavar="S,S,…", help=text
        )
        kills.add_argument("--kills", type=int, default=20, metavar="N")
        kills.add_argument("--seed", type=int, default=1, help="of victims, moments and the job")
        text = "kills under torchrun, each in a run of its own (default 1)"
        kills.add_argument("--peer-kills", type=int, default=1, metavar="N", help=text)
        kills.add_argument("--no-peer", action="store_true", help="leave torchrun out")
        text = "env steps a second: simulator alone, plain DDP, elastic job"
        rates = benchmarks.add_parser("throughput", help=text, description=text)
        rates.add_argument("--workers", type=int, default=2, metavar="N")
        rates.add_argument("--iterations", type=int, default=20, metavar="N")
        rates.add_argument("--rounds", type=int, default=3, metavar="N")
        rates.add_argument("--seed", type=int, default=1, help="of the job")
        text = "PPO beside RSL-RL's, on the same env: env steps a second, rollout and update time"
        rivals = benchmarks.add_parser("ppo", help=text, description=text)
        rivals.add_argument("--iterations", type=int, default=5, metavar="N", help="of a turn")
        rivals.add_argument("--rounds", type=int, default=6, metavar="N")
        rivals.add_argument("--seed", type=int, default=1, help="of the job")
        text = f"where RSL-RL is installed (default {ppo.default_peer()})"
        rivals.add_argument(
            "--peer", type=Path, default=ppo.default_peer(), metavar="DIR", help=text
        )
        text = "many kills in one run, of workers and of the supervisor; what must hold after each"
        blows = benchmarks.add_parser("soak", help=text, description=text)
        blows.add_argument("--workers", type=int, default=3, metavar="N")
        blows.add_argument("--kills", type=int, default=200, metavar="N")
        blows.add_argument("--seed", type=int, default=1, help="of victims, moments and the job")
        text = "env steps a second by number of workers, and the bytes of each collective"
        scales = benchmarks.add_parser("scaling", help=text, description=text)
        scales.add_argument("--workers", type=counts, default=(1, 2, 4), metavar="N,N,…")
        scales.add_argument("--iterations", type=int, default=20, metavar="N")
        scales.add_argument("--seed", type=int, default=1, help="of the job")
        configure_membership(benchmarks)
        configure_checkpoint(benchmarks)
        configure_torchft(benchmarks)
        text = "preemption notices to nodes of a job on etcd: env steps lost, and the others' stall"
        warned = benchmarks.add_parser("notice", help=text, description=text)
        warned.add_argument("--nodes", type=int, default=3, metavar="N")
        warned.add_argument("--notices", type=int, default=10, metavar="N")
        warned.add_argument("--seed", type=int, default=1, help="of victims and the job")
        for parts, task in (
            *((one, DEFAULT) for one in (kills, rates, rivals, scales)),
            (blows, "pointmass"),
            (warned, DEFAULT),
        ):
            parts.add_argument("--task", default=task, choices=sorted(TASK_OVERRIDES))
            add_common(parts)

    def run(self, args: argparse.Namespace) -> int:
        """0; 1 when a kill was not recovered from, or something did not hold."""
        failed = False
        with ends_in_order(), tempfile.TemporaryDirectory(prefix="rallypoint-bench-") as directory:
            if args.benchmark == "recovery" and args.nodes:
                document = _node_recovery(args, Path(directory))
                text = nodereport.text(document)
                failed = any(document["errors"])
            elif args.benchmark == "recovery":
                document = _recovery(args, Path(directory))
                text = report.recovery_text(document)
                failed = document["recovered"] < args.kills
            elif args.benchmark == "soak":
                document = _soak(args, Path(directory))
                text = report.soak_text(document)
                failed = bool(document["violations"])
            elif args.benchmark == "scaling":
                document = _scaling(args, Path(directory))
                text = scaling.text(document)
                failed = not document["agrees"]
            elif args.benchmark == "checkpoint":
                document = _checkpoint(args, Path(directory))
                text = checkpoint.text(document)
            elif args.benchmark == "membership":
                document = _membership(args, Path(directory))
                text = membershipreport.text(document)
            elif args.benchmark == "notice":
                document = _notice(args, Path(directory))
                text, failed = notice.text(document), not document["held"]
            elif args.benchmark == "torchft":
                document = _torchft(args, Path(directory))
                text = ftpeer.text(document)
            elif args.benchmark == "ppo":
                document = _ppo(args, Path(directory))
                text = ppo.text(document)
            else:
                document = _throughput(args, Path(directory))
                text = report.throughput_text(document)
        if args.output is not None:
            args.output.write_text(json.dumps(document, indent=1) + "\n")
        print(json.dumps(document) if args.json else text)
        return 1 if failed else 0


@contextmanager
def ends_in_order() -> Iterator[None]:
    """SIGTERM ends every block that was entered: no process and no network namespace is left behind."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _about(args: argparse.Namespace) -> dict[str, Any]:
    names = ("workers", "task", "seed", "settings")
    return {name: getattr(args, name) for name in names}


def _job_settings(args: argparse.Namespace) -> list[str]:
    own = [f"env.task={args.task}", f"job.seed={args.seed}"]
    return [*own, *args.settings]


def _recovery(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    if args.workers < 2 or args.kills < 1:
        raise ConfigError(
            f"--workers {args.workers} --kills {args.kills}: at least 2 workers (somebody must "
            "survive) and 1 kill"
        )
    numbers = itertools.count(1)

    def show(kill: Kill) -> None:
        if not args.json:
            print(report.kill_text(next(numbers), kill), flush=True)

    with Job(directory, args.workers, ["job.iterations=none", *_job_settings(args)]) as job:
        outcome = recovery.measure(job, args.kills, args.seed, show)
    backend = "nccl" if any(x.startswith("node.devices=") for x in args.settings) else "gloo"
    peers = [
        peer.measure(directory / f"peer-{number}", args.workers, args.seed + number, backend)
        for number in range(0 if args.no_peer else args.peer_kills)
    ]
    return report.recovery_document(outcome, peers, _about(args))


def _node_recovery(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    if args.nodes < 3 or args.kills < 1 or min(args.detect_s) <= 0:
        raise ConfigError(
            f"--nodes {args.nodes} --kills {args.kills} --detect-s {min(args.detect_s):g}: at least 3 "
            "nodes, 1 kill, and more than 0 s"
        )

    def show(loss: NodeLoss) -> None:
        if not args.json:
            print(nodereport.loss_text(loss), flush=True)

    runs = [
        noderecovery.measure(
            directory / f"detect-{detect_s:g}",
            args.nodes,
            losses=args.kills,
            detect_s=detect_s,
            settings=_job_settings(args),
            seed=args.seed,
            show=show,
        )
        for detect_s in args.detect_s
    ]
    drills = {loss.drill for run in runs for loss in run.losses}
    peers = {
        drill: [
            noderecovery.measure_peer(directory / f"peer-{drill}-{n}", args.nodes, drill)
            for n in range(0 if args.no_peer else args.peer_kills)
        ]
        for drill in noderecovery.DRILLS
        if drill in drills
    }
    about = {"nodes": args.nodes, "task": args.task, "seed": args.seed, "settings": args.settings}
    return nodereport.document(runs, peers, about)


def _soak(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    if args.workers < 2 or args.kills < 2:
        raise ConfigError(
            f"--workers {args.workers} --kills {args.kills}: at least 2 workers (somebody must "
            "survive) and 2 kills"
        )
    numbers = itertools.count(1)

    def show(blow: Blow) -> None:
        if not args.json:
            print(report.blow_text(next(numbers), blow), flush=True)

    # Workers must be there to be adopted however long a busy machine takes to start a supervisor.
    own = ["job.iterations=none", "membership.orphan_grace_s=60"]
    with Job(directory, args.workers, [*own, *_job_settings(args)]) as job:
        outcome = soak.measure(job, args.kills, args.seed, show)
    return report.soak_document(outcome, {**_about(args), "kills": args.kills})


def _scaling(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    if args.iterations < 1:
        raise ConfigError(f"--iterations {args.iterations}: at least 1")
    sizes = [
        scaling.measure(directory / f"{n}", n, args.iterations, _job_settings(args))
        for n in args.workers
    ]
    return scaling.document(sizes, {**_about(args), "iterations": args.iterations})


def _membership(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    if args.nodes[0] < 3 or args.losses < 1 or args.idle_s <= 0:
        raise ConfigError(
            f"--nodes {args.nodes[0]} --losses {args.losses} --idle-s {args.idle_s:g}: at least 3 nodes, "
            "1 loss, and more than 0 s"
        )

    def show(nodes: int, loss: Loss) -> None:
        if not args.json:
            print(membershipreport.loss_text(nodes, loss), flush=True)

    sizes = [
        membership.measure(
            directory / f"{nodes}",
            nodes,
            losses=args.losses,
            idle_s=args.idle_s,
            settings=args.settings,
            seed=args.seed,
            show=show,
        )
        for nodes in args.nodes
    ]
    about = {"seed": args.seed, "settings": args.settings, "losses_of_each_kind": args.losses}
    return membershipreport.document(sizes, about)


def _checkpoint(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    size_bytes = checkpoint.parse_size(args.size)
    if args.saves < 1:
        raise ConfigError(f"--saves {args.saves}: at least 1")
    rows = checkpoint.measure(
        directory,
        size_bytes,
        saves=args.saves,
        device=args.device,
        url=args.url,
        on_row=lambda row: None if args.json else print(checkpoint.row_text(row), flush=True),
    )
    about = {name: getattr(args, name) for name in ("size", "saves", "device")}
    return checkpoint.document(rows, about)


def _notice(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    if args.nodes < 2 or args.notices < 1:
        raise ConfigError(
            f"--nodes {args.nodes} --notices {args.notices}: at least 2 nodes (somebody must stay) and 1 "
            "notice"
        )
    numbers = itertools.count(1)

    def show(noticed: Noticed) -> None:
        if not args.json:
            print(notice.line_text(next(numbers), noticed), flush=True)

    document = notice.measure(
        directory,
        nodes=args.nodes,
        notices=args.notices,
        seed=args.seed,
        settings=_job_settings(args),
        show=show,
    )
    about = {"nodes": args.nodes, "task": args.task, "seed": args.seed, "settings": args.settings}
    return {**about, **document}


def _torchft(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    if args.workers < 2 or min(args.kills, args.stops) < 0:
        raise ConfigError(
            f"--workers {args.workers} --kills {args.kills} --stops {args.stops}: at least 2 workers "
            "(somebody must survive), and no number below 0"
        )
    system = ftpeer.version(args.peer)
    blows = ftpeer.measure(
        directory,
        args.peer,
        workers=args.workers,
        kills=args.kills,
        stops=args.stops,
        seed=args.seed,
        show=lambda blow: None if args.json else print(ftpeer.line_text(blow), flush=True),
    )
    about = {"system": system, "workers": args.workers, "seed": args.seed}
    return ftpeer.document(blows, about)


def _throughput(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    if min(args.workers, args.iterations, args.rounds) < 1:
        raise ConfigError("--workers, --iterations and --rounds must be at least 1")
    setting = Setting(args.workers, args.iterations, _job_settings(args))
    config = setting.config()
    if config.env.budget != "per_rank":
        raise ConfigError("bench throughput compares ranks with env.budget = 'per_rank' only")
    rounds = [
        throughput.measure(directory / f"round-{number}", setting) for number in range(args.rounds)
    ]
    envs = {"num_envs": config.env.num_envs * args.workers, "iterations": args.iterations}
    return report.throughput_document(rounds, {**_about(args), **envs})


def _ppo(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    if min(args.iterations, args.rounds) < 1:
        raise ConfigError("--iterations and --rounds must be at least 1")
    config = ppo.configuration(_job_settings(args))
    there = (args.peer / "rsl_rl").is_dir()
    rounds = ppo.measure(
        directory,
        config,
        args.peer if there else None,
        rounds=args.rounds,
        iterations=args.iterations,
    )
    about = {"task": args.task, "seed": args.seed, "settings": args.settings}
    own = {"num_envs": config.env.num_envs, "peer": str(args.peer)}
    return ppo.document(rounds, args.iterations, {**about, **own})


COMMAND: Command = BenchCommand()
