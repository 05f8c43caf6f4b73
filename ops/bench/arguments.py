"""Arguments of the benchmarks that several have, or that need some lines."""

import argparse
from pathlib import Path
from typing import Any


def counts(text: str) -> tuple[int, ...]:
    """Numbers of workers or nodes, ascending, from ``1,2,4``."""
    counts = tuple(sorted({int(part) for part in text.split(",")}))
    if counts[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: at least 1")
    return counts


def seconds(text: str) -> tuple[float, ...]:
    """Seconds, as given, from ``5,3``."""
    return tuple(float(part) for part in text.split(","))


def configure_membership(benchmarks: Any) -> None:
    """``bench membership``."""
    text = "nodes without workers on one etcd: time from a loss to everybody having the new plan"
    parser = benchmarks.add_parser("membership", help=text, description=text)
    parser.add_argument("--nodes", type=counts, default=(10, 100), metavar="N,N,…")
    parser.add_argument("--losses", type=int, default=5, metavar="N", help="of each kind (5)")
    parser.add_argument("--idle-s", type=float, default=10.0, metavar="S", help="watched idle (10)")
    parser.add_argument("--seed", type=int, default=1, help="of victims")
    add_common(parser)


def configure_checkpoint(benchmarks: Any) -> None:
    """``bench checkpoint``."""
    text = (
        "stall of the loop, time to be durable and memory of a checkpoint, beside torch's own ways"
    )
    parser = benchmarks.add_parser("checkpoint", help=text, description=text)
    parser.add_argument("--size", default="100MB", metavar="SIZE", help="of the state (100MB)")
    parser.add_argument("--saves", type=int, default=3, metavar="N", help="timed, at most (3)")
    parser.add_argument("--device", default="cpu", help="where the live state is: cpu, cuda")
    text = "where to save to beside a local directory (an S3 server on this machine, by moto)"
    parser.add_argument("--url", metavar="URL", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON here")


def add_common(parser: argparse.ArgumentParser) -> None:
    """Settings of the job, and where the result goes."""
    text = "a further setting of the job; may be repeated"
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help=text
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON here")


def configure_torchft(benchmarks: Any) -> None:
    """``bench torchft``."""
    text = "torchft in the place of the job: kill and stop replica groups of one worker"
    parser = benchmarks.add_parser("torchft", help=text, description=text)
    parser.add_argument("--workers", type=int, default=3, metavar="N")
    parser.add_argument("--kills", type=int, default=10, metavar="N")
    parser.add_argument(
        "--stops", type=int, default=1, metavar="N", help="workers that fall silent"
    )
    parser.add_argument("--seed", type=int, default=1, help="of victims")
    text = "where torchft and what it needs are installed (pip install --target DIR torchft); else here"
    parser.add_argument("--peer", type=Path, metavar="DIR", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON here")
