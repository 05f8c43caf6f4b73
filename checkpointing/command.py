"""``rallypoint checkpoints list|verify URL [--json]``."""

import argparse
import sys
from dataclasses import dataclass
from typing import TypedDict

import msgspec

from rallypoint.checkpointing import restore
from rallypoint.checkpointing.errors import CheckpointError
from rallypoint.checkpointing.manifest import CheckpointInfo
from rallypoint.checkpointing.store import CheckpointStore
from rallypoint.daemon.shared.command import Command


class Row(TypedDict):
    """One checkpoint, as ``--json`` prints it."""

    iteration: int
    generation: int
    path: str
    verified: bool
    size_bytes: int
    error: str | None


@dataclass(frozen=True)
class CheckpointsCommand:
    """List checkpoints, or check that they can be restored."""

    help: str = "list or verify checkpoints"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the subcommands."""
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        for name, text in (
            ("list", "show every committed checkpoint, newest first, and whether it verifies"),
            ("verify", "the same, with exit code 1 when one is damaged or there is none"),
        ):
            action = actions.add_parser(name, help=text, description=text)
            action.add_argument(
                "url", metavar="URL", help="a checkpoint, a directory of them, or a run's directory"
            )
            action.add_argument("--json", action="store_true", help="print a JSON array")

    def run(self, args: argparse.Namespace) -> int:
        """0; for ``verify`` 1 when a checkpoint is damaged or there is none."""
        store, infos = restore.find(args.url)
        rows = [_row(store, info) for info in infos]
        if args.json:
            print(msgspec.json.encode(rows).decode())
        else:
            _print_table(rows)
        if not rows:
            print(f"{args.url}: no committed checkpoint", file=sys.stderr)
        if args.action == "list":
            return 0
        return 0 if rows and all(row["verified"] for row in rows) else 1


def _row(store: CheckpointStore, info: CheckpointInfo) -> Row:
    error: str | None = None
    try:
        store.verify(info)
    except CheckpointError as damage:
        error = str(damage)
    return Row(
        iteration=info.iteration,
        generation=info.generation,
        path=info.path,
        verified=error is None,
        size_bytes=info.size_bytes,
        error=error,
    )


def _print_table(rows: list[Row]) -> None:
    if rows:
        print(f"{'iteration':>10} {'generation':>10} {'bytes':>12}  {'verified':8}  path")
    for row in rows:
        print(
            f"{row['iteration']:>10} {row['generation']:>10} {row['size_bytes']:>12}  "
            f"{'yes' if row['verified'] else 'DAMAGED':8}  {row['path']}"
        )
        if row["error"]:
            print(f"{'':>10} {row['error']}")


COMMAND: Command = CheckpointsCommand()
