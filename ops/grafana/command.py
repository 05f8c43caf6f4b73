"""``rallypoint dashboard``: files for Grafana, and pictures for those who have none."""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from rallypoint.daemon.commands.client import AdminClient, NoSupervisorError
from rallypoint.daemon.shared.command import Command
from rallypoint.daemon.shared.configload import from_json
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.ops.grafana import grafanajson
from rallypoint.ops.grafana.boards import DASHBOARDS
from rallypoint.ops.grafana.preview.render import Written, choose_boards, choose_job, render
from rallypoint.ops.grafana.prometheus import Prometheus
from rallypoint.ops.grafana.scraper import SCRAPE_S, Scraper, ScraperError, scraper

_PAST_S: Final = 3600.0
_WATCH_S: Final = 60.0
_LEAST_S: Final = 5.0
_LOOK_S: Final = 1.0
_SAMPLES: Final = 2
"""Fewer show nothing."""
_FIRST_S: Final = 60.0
"""They come within seconds, or not at all."""


class DashboardCommand:
    """Writes files; touches no run."""

    help: Final = "dashboards of a job: files for Grafana, pages and pictures without Grafana"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        export = actions.add_parser("export", help="write the files that Grafana imports")
        preview = actions.add_parser("preview", help="draw them, without Grafana")
        source = preview.add_mutually_exclusive_group(required=True)
        source.add_argument("--prometheus", metavar="URL", help="the server that has the figures")
        source.add_argument(
            "--dir", type=Path, metavar="DIR", help="watch the run in this directory for a while"
        )
        preview.add_argument("--job", metavar="NAME", help="which one of the server's jobs")
        preview.add_argument(
            "--last-s",
            type=float,
            metavar="S",
            help=f"how much of the past ({_PAST_S:g}); with --dir, how long to watch ({_WATCH_S:g})",
        )
        preview.add_argument(
            "--only",
            metavar="NAMES",
            help=f"only these, separated by commas: {', '.join(b.slug for b in DASHBOARDS)}",
        )
        for action in (export, preview):
            action.add_argument(
                "--output", type=Path, required=True, metavar="DIR", help="where to"
            )
            action.add_argument("--json", action="store_true", help="print one JSON document")

    def run(self, args: argparse.Namespace) -> int:
        """Do it; exit code 0."""
        written = _export(args.output) if args.action == "export" else _preview(args)
        if args.json:
            print(json.dumps(_document(written)))
            return 0
        for one in written:
            empty = f"  (no value: {', '.join(one.empty)})" if one.empty else ""
            print(one.page if one.picture is None else f"{one.page} {one.picture}{empty}")
        return 0


def _document(written: list[Written]) -> dict[str, object]:
    return {
        "files": [str(one.page) for one in written],
        "pictures": [str(one.picture) for one in written if one.picture is not None],
        "empty": {one.page.stem: list(one.empty) for one in written if one.empty},
    }


def _export(folder: Path) -> list[Written]:
    """One file for each dashboard."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--output {folder}: cannot be made ({error.strerror}); give a directory"
        ) from error
    written = [Written(folder / f"{board.slug}.json", None, ()) for board in DASHBOARDS]
    for one, board in zip(written, DASHBOARDS, strict=True):
        one.page.write_text(grafanajson.text(board), encoding="utf-8")
    return written


def _preview(args: argparse.Namespace) -> list[Written]:
    seconds = args.last_s if args.last_s is not None else _WATCH_S if args.dir else _PAST_S
    if not seconds >= _LEAST_S:
        raise ConfigError(f"--last-s {seconds:g}: at least {_LEAST_S:g} seconds")
    boards = choose_boards(args.only)
    if args.prometheus is not None:
        server = Prometheus(args.prometheus)
        end_s = time.time()
        job = choose_job(server, args.job)
        return render(server, job, (end_s - seconds, end_s), args.output, boards)
    with AdminClient(args.dir) as client:  # before a server is started for nobody
        job = client.ask(command="status")["status"]["job"]
    node = from_json(RunDir(args.dir).config.read_bytes()).node.name
    with (
        tempfile.TemporaryDirectory(prefix="rallypoint-dashboard-") as folder,
        scraper(Path(folder)) as watching,
    ):
        if not args.json:
            print(f"watching {job} for {seconds:g} s", file=sys.stderr)
        start_s = _watch(args.dir, watching, (job, node), seconds)
        return render(watching.server, job, (start_s, time.time()), args.output, boards)


def _watch(directory: Path, watching: Scraper, name: tuple[str, str], seconds: float) -> float:
    """Scrape the supervisor of a directory, wherever it serves, also the one that follows it; ``seconds``
    long from the first sample, whose moment is returned. Raises `ScraperError` when none comes."""
    begin_s, first_s, aimed = time.time(), 0.0, ""
    while not first_s or time.time() < first_s + seconds:
        try:
            with AdminClient(directory) as client:
                url = client.ask(command="status")["status"]["metrics_url"]
        except NoSupervisorError:
            url = aimed  # it may be started again; until then there is a gap
        if url != aimed:
            watching.aim({name: url})
            aimed = url
        if not first_s and watching.scraped(_SAMPLES):
            first_s = time.time()
        if not first_s and time.time() > begin_s + _FIRST_S:
            raise ScraperError(f"{url} was not scraped within {_FIRST_S:g} s: {watching.why_not()}")
        time.sleep(_LOOK_S)
    return first_s - SCRAPE_S * _SAMPLES


COMMAND: Command = DashboardCommand()
