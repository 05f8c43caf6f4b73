"""``rallypoint dashboard``: files for Grafana, and pictures for those who have none."""

import argparse
import json
from pathlib import Path
from typing import Final

from rallypoint.daemon.shared.command import Command
from rallypoint.ops.grafana import grafanajson
from rallypoint.ops.grafana.boards import DASHBOARDS


class DashboardCommand:
    """Writes files; touches nothing else."""

    help: Final = "dashboards of a job: files for Grafana"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        export = actions.add_parser("export", help="write the files that Grafana imports")
        export.add_argument("--output", type=Path, required=True, metavar="DIR", help="where to")
        export.add_argument("--json", action="store_true", help="print one JSON document")

    def run(self, args: argparse.Namespace) -> int:
        """Do it; exit code 0."""
        paths = export(args.output)
        if args.json:
            print(json.dumps({"files": [str(path) for path in paths]}))
        else:
            print(*paths, sep="\n")
        return 0


def export(folder: Path) -> list[Path]:
    """Write one file for each dashboard; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for board in DASHBOARDS:
        path = folder / f"{board.slug}.json"
        path.write_text(grafanajson.text(board), encoding="utf-8")
        paths.append(path)
    return paths


COMMAND: Command = DashboardCommand()
