"""What ``rallypoint status --watch`` shows: the job, its workers with their phases, the last changes."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rallypoint.daemon.commands.history import Event, notes, read_events, who
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.daemon.shared.slotpage import SlotPage

CHANGES: Final = 6
"""How many of the last changes are shown."""
_TAIL_BYTES: Final = 2**20
_BAR: Final = 40
"""Characters of the longest bar, where there is room."""
_LEAST_BAR: Final = 12
_PADDING: Final = (0, 1, 0, 0)
"""Little, so that 80 characters hold a row."""
_UNITS_S: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_COLOURS: Final = {
    "detect": "red",
    "plan": "yellow",
    "release": "magenta",
    "group": "blue",
    "sync": "cyan",
    "envs": "white",
    "first_step": "green",
}
_STATES: Final = {
    "training": "green",
    "ready": "cyan",
    "rebuilding": "yellow",
    "waiting": "yellow",
    "draining": "yellow",
    "lost": "red",
    "quarantined": "red",
}
_COLUMNS: Final = ("rank", "committed_iteration", "num_envs", "incarnation", "pid")


def render(
    rundir: RunDir, status: Mapping[str, Any], lines: Sequence[str], now_unix_s: float
) -> RenderableType:
    """The whole picture; ``lines`` say the run in words."""
    parts: list[RenderableType] = [Text(line) for line in lines]
    parts.append(_workers(rundir, status["workers"]))
    try:
        events = read_events(rundir.journal, _TAIL_BYTES)[-CHANGES:]
    except ConfigError:
        events = []  # nothing has formed yet
    if events:
        parts += [_changes(events, now_unix_s), _legend()]
    return Group(*parts)


def _workers(rundir: RunDir, workers: Sequence[Mapping[str, Any]]) -> Table:
    """Workers by node. Phases are on the slots' pages, which only their own node has."""
    names = ("node", "slot", "state", "phase", "rank", "committed", "envs", "life", "pid")
    table = Table(*names, box=box.SIMPLE_HEAD, padding=_PADDING)
    node = None
    for worker in workers:
        if node not in (None, worker["node"]):
            table.add_section()
        state = worker["state"]
        table.add_row(
            worker["node"] if worker["node"] != node else "",
            str(worker["slot"]),
            Text(state, style=_STATES.get(state, "")),
            _phase(rundir.page(worker["slot"])) if worker["pid"] is not None else "-",
            *("-" if worker[key] is None else str(worker[key]) for key in _COLUMNS),
        )
        node = worker["node"]
    return table


def _phase(page: Path) -> str:
    """What the worker of a slot does now; "-" while it has no page yet."""
    try:
        slot = SlotPage(page)
    except (OSError, ValueError):
        return "-"
    try:
        counters = slot.read()
    finally:
        slot.close()
    inside = ", collective" if counters.inside else ""
    return f"{counters.phase}{inside}"


def _changes(events: Sequence[Event], now_unix_s: float) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=_PADDING)
    for name in ("gen", "ago"):
        table.add_column(name, no_wrap=True)
    table.add_column("change")
    table.add_column("who", overflow="fold")
    for name in ("workers", "seconds"):
        table.add_column(name, no_wrap=True)
    table.add_column("phases")
    longest_s = max((sum(seconds for _, seconds in phases(e)) for e in events), default=0.0)
    for event in reversed(events):
        total_s, more = event.seconds["total"], notes(event)
        table.add_row(
            str(event.generation),
            ago(now_unix_s - event.at_unix_s),
            f"{event.kind}, {event.cause}" + (f" ({more})" if more else ""),
            who(event),
            str(event.world_size),
            "-" if total_s is None else f"{total_s:.3f}",
            _Bar(event, longest_s),
        )
    return table


def phases(event: Event) -> list[tuple[str, float]]:
    """Seconds of each phase, one after the other. In the journal ``plan`` begins with ``detect``."""
    known = {phase: event.seconds[phase] or 0.0 for phase in _COLOURS}
    known["plan"] = max(0.0, known["plan"] - known["detect"])
    return [(phase, seconds) for phase, seconds in known.items() if seconds > 0.0]


def ago(seconds: float) -> str:
    """How long ago, in the greatest unit of which it is one."""
    scale_s, unit = next((one for one in _UNITS_S if seconds >= one[0]), _UNITS_S[-1])
    return f"{max(0.0, seconds) // scale_s:.0f} {unit}"


class _Bar:
    """A bar as wide as its column."""

    def __init__(self, event: Event, longest_s: float) -> None:
        self._event = event
        self._longest_s = longest_s

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_LEAST_BAR, _BAR)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield bar(self._event, self._longest_s, min(_BAR, options.max_width))


def bar(event: Event, longest_s: float, room: int = _BAR) -> Text:
    """A bar whose parts are the phases; as long as ``longest_s`` seconds it fills its ``room``
    (characters). What took any time at all gets a character where there is room for one."""
    text, shown, until_s = Text(), 0, 0.0
    for phase, seconds in phases(event):
        until_s += seconds
        end = round(room * until_s / longest_s) if longest_s > 0.0 else 0
        width = min(max(end - shown, 1), room - shown)
        text.append("█" * width, style=_COLOURS[phase])
        shown += width
    return text


def _legend() -> Text:
    text = Text()
    for phase, colour in _COLOURS.items():
        text.append("█ ", style=colour)
        text.append(f"{phase}  ")
    return text
