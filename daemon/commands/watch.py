"""What ``rallypoint status --watch`` shows: the job, its workers with their phases, the last changes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Group, RenderableType
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
"""Characters of the longest bar."""
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


def render(rundir: RunDir, status: Mapping[str, Any], lines: Sequence[str]) -> RenderableType:
    """The whole picture; ``lines`` say the run in words."""
    parts: list[RenderableType] = [Text(line) for line in lines]
    parts.append(_workers(rundir, status["workers"]))
    try:
        events = read_events(rundir.journal, _TAIL_BYTES)[-CHANGES:]
    except ConfigError:
        events = []  # nothing has formed yet
    if events:
        parts += [_changes(events), _legend()]
    return Group(*parts)


def _workers(rundir: RunDir, workers: Sequence[Mapping[str, Any]]) -> Table:
    """Workers by node. Phases are on the slots' pages, which only their own node has."""
    table = Table("node", "slot", "state", "phase", "rank", "committed", "envs", "life", "pid")
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
    inside = " (in a collective)" if counters.inside else ""
    return f"{counters.phase}{inside}"


def _changes(events: Sequence[Event]) -> Table:
    table = Table("generation", "change", "who", "workers", "seconds", "where they went")
    longest_s = max((sum(seconds for _, seconds in phases(e)) for e in events), default=0.0)
    for event in reversed(events):
        total_s, more = event.seconds["total"], notes(event)
        table.add_row(
            str(event.generation),
            f"{event.kind}, {event.cause}" + (f" ({more})" if more else ""),
            who(event),
            str(event.world_size),
            "-" if total_s is None else f"{total_s:.3f}",
            bar(event, longest_s),
        )
    return table


def phases(event: Event) -> list[tuple[str, float]]:
    """Seconds of each phase, one after the other. In the journal ``plan`` begins with ``detect``."""
    known = {phase: event.seconds[phase] or 0.0 for phase in _COLOURS}
    known["plan"] = max(0.0, known["plan"] - known["detect"])
    return [(phase, seconds) for phase, seconds in known.items() if seconds > 0.0]


def bar(event: Event, longest_s: float) -> Text:
    """A bar whose parts are the phases; as long as ``longest_s`` seconds it fills the column. What took
    any time at all gets a character where there is room for one."""
    text, shown, until_s = Text(), 0, 0.0
    for phase, seconds in phases(event):
        until_s += seconds
        end = round(_BAR * until_s / longest_s) if longest_s > 0.0 else 0
        width = min(max(end - shown, 1), _BAR - shown)
        text.append("█" * width, style=_COLOURS[phase])
        shown += width
    return text


def _legend() -> Text:
    text = Text()
    for phase, colour in _COLOURS.items():
        text.append("█ ", style=colour)
        text.append(f"{phase}  ")
    return text
