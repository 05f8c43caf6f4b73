"""``rallypoint events``: the history of a run's generations, from its journal; no supervisor is needed."""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from rallypoint.daemon.commands.client import add_dir
from rallypoint.daemon.executors.labels import PHASES
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.plan import ChangeCause, ChangeKind
from rallypoint.daemon.shared.rundir import RunDir

_ITERATION: Final = b'{"event":"iteration"'
_PLAIN_WIDTH: Final = 160
"""Characters of a line where nobody says how wide the screen is."""


class Event(msgspec.Struct):
    """One formed generation; ``--json`` prints these fields."""

    generation: int
    at_unix_s: float
    """When it had formed."""
    kind: ChangeKind
    cause: ChangeCause
    world_size: int
    joined: list[str]
    """``node/slot#incarnation`` of who was not in the generation before."""
    left: list[str]
    """Of who was, and is not in this one."""
    hold: bool
    restore: bool
    rolled_back: bool
    """The iteration that was in progress was done again."""
    iteration: int
    """Newest committed one when it formed."""
    source: str
    """Whose state it began with."""
    seconds: dict[str, float | None]
    """By phase, as in ``status``; all None until its members on this node train."""


def read_events(journal: Path, tail_bytes: int | None = None) -> list[Event]:
    """The generations of a journal, oldest first; of its last ``tail_bytes``, where that is given. Raises
    `ConfigError` when there is no journal."""
    try:
        with journal.open("rb") as file:
            begin = 0 if tail_bytes is None else max(0, file.seek(0, 2) - tail_bytes)
            file.seek(begin)
            if begin:
                file.readline()
            return _events(_lines(file), whole=not begin)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"{journal}: there is no journal; --dir must be the directory of a run that has begun"
        ) from error


def _lines(file: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for raw in file:
        if raw.startswith(_ITERATION):
            continue  # nearly all are
        try:
            yield json.loads(raw)
        except ValueError:
            continue  # a killed supervisor did not end it


def _events(lines: Iterable[dict[str, Any]], *, whole: bool) -> list[Event]:
    """Of part of a journal the first generation is left out: who was there before is not known."""
    events: dict[int, Event] = {}
    before: set[str] = set()
    for line in lines:
        if line["event"] == "generation":
            members = {_name(member) for member in line["members"]}
            events[line["generation"]] = _event(line, members, before)
            before = members
        elif line["event"] == "recovery" and line["generation"] in events:
            events[line["generation"]].seconds.update(line["seconds"])
    found = list(events.values())
    return found if whole else found[1:]


def _event(line: Mapping[str, Any], members: set[str], before: set[str]) -> Event:
    return Event(
        generation=line["generation"],
        at_unix_s=line["unix_s"],
        kind=line["kind"],
        cause=line["cause"],
        world_size=line["world_size"],
        joined=sorted(members - before),
        left=sorted(before - members),
        hold=line["hold"],
        restore=line["restore"],
        rolled_back=line["rolled_back"],
        iteration=line["iteration"],
        source=_name(line["source"]),
        seconds=dict.fromkeys(PHASES),
    )


def _name(key: Mapping[str, Any]) -> str:
    return f"{key['node']}/{key['slot']}#{key['incarnation']}"


def who(event: Event) -> str:
    """Who came (+) and who went (-)."""
    return " ".join((*(f"-{name}" for name in event.left), *(f"+{name}" for name in event.joined)))


def notes(event: Event) -> str:
    """What is not ordinary about it."""
    said = (
        ("holds", event.hold),
        ("restored", event.restore and event.iteration > 0),
        ("redone", event.rolled_back),
    )
    return ", ".join(text for text, true in said if true)


class EventsCommand:
    """Reads ``journal.jsonl``."""

    help: Final = "show the history of a run's generations: cause, who, how long"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        add_dir(parser)
        parser.add_argument("--last", type=int, metavar="N", help="only the newest N")
        parser.add_argument("--json", action="store_true", help="print one JSON array")

    def run(self, args: argparse.Namespace) -> int:
        """Print; exit code 0."""
        events = read_events(RunDir(args.dir).journal)
        events = events if args.last is None else events[len(events) - max(0, args.last) :]
        if args.json:
            print(msgspec.json.encode(events).decode())
        else:
            _print(events)
        return 0


def _print(events: list[Event]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    table = Table(box=box.SIMPLE)
    for column in ("generation", "formed at", "change", "workers", "iteration", "seconds", "notes"):
        table.add_column(column, no_wrap=True)
    table.add_column("who", overflow="fold")
    for event in events:
        total_s = event.seconds["total"]
        table.add_row(
            str(event.generation),
            f"{datetime.fromtimestamp(event.at_unix_s, UTC).astimezone():%Y-%m-%d %H:%M:%S}",
            f"{event.kind}, {event.cause}",
            str(event.world_size),
            str(event.iteration),
            "-" if total_s is None else f"{total_s:.3f}",
            notes(event),
            who(event),
        )
    console.print(table)


COMMAND = EventsCommand()
