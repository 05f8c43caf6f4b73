"""Named, inert points at which a fault test can kill, stop, delay or fail this process.

``RALLYPOINT_FAILPOINTS`` arms them: a comma-separated list of
``name[:rank][@iteration]=kill|stop|raise|sleep=SECONDS``, or ``@FILE``: then the file holds the list,
and is read again whenever it has changed, so that a running job can be armed. Without the variable,
`hit` is one attribute test.
A point that fires first appends a line to ``RALLYPOINT_FAILPOINT_LOG`` (fsynced), so that a test can
assert that the fault really happened, and each entry fires once per log file, however often the
process restarts.
"""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, assert_never

from rallypoint.daemon.shared.errors import ConfigError

VARIABLE: Final = "RALLYPOINT_FAILPOINTS"
LOG_VARIABLE: Final = "RALLYPOINT_FAILPOINT_LOG"

NAMES: Final = (
    # worker, in the order of an iteration
    "rollout",
    "block_count",
    "blocks",
    "gae",
    "epoch_moments",
    "aux_counts",
    "mini_batch",
    "backward_begin",
    "backward_end",
    "between_steps",
    "last_collective",
    "prepared",
    "committed",
    "conclude",
    "checkpoint_save",
    "checkpoint_manifest",
    # worker, in the order of a generation
    "warm_up",
    "ready",
    "arrive",
    "group_init",
    "who_is_where",
    "broadcast",
    "hash_gather",
    "hash_compare",
    "formed_before_mark",
    "formed_after_mark",
    "first_commit",
    "rows_wanted",
    "rows_bytes",
    "rows",
    "leave_generation",
    # supervisor
    "supervisor_publish",
    "supervisor_mark_formed",
)


class InjectedFault(Exception):
    """Raised by a failpoint armed with ``raise``."""


@dataclass(frozen=True)
class Armed:
    """One entry: where, and what happens there."""

    name: str
    rank: int | None
    iteration: int | None
    action: Literal["kill", "stop", "raise", "sleep"]
    seconds: float = 0.0

    def __str__(self) -> str:
        rank = "" if self.rank is None else f":{self.rank}"
        iteration = "" if self.iteration is None else f"@{self.iteration}"
        return f"{self.name}{rank}{iteration}={self.action}"


def parse(text: str) -> tuple[Armed, ...]:
    """Entries of ``RALLYPOINT_FAILPOINTS``. Raises `ConfigError` naming the entry."""
    return tuple(_parse_entry(entry.strip()) for entry in text.split(",") if entry.strip())


def _parse_entry(entry: str) -> Armed:
    point, _, action = entry.partition("=")
    name, at, iteration = point.partition("@")
    name, colon, rank = name.partition(":")
    verb, _, seconds = action.partition("=")
    try:
        if name not in NAMES:
            raise ValueError(f"no failpoint is named {name!r}; there are {', '.join(NAMES)}")
        if verb not in ("kill", "stop", "raise", "sleep"):
            raise ValueError(f"action {verb!r} is not one of kill, stop, raise, sleep=SECONDS")
        return Armed(
            name=name,
            rank=int(rank) if colon else None,
            iteration=int(iteration) if at else None,
            action=verb,  # type: ignore[arg-type]
            seconds=float(seconds) if verb == "sleep" else 0.0,
        )
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}: {entry!r}: {error}") from error


class Failpoints:
    """The armed points of this process."""

    def __init__(
        self,
        armed: tuple[Armed, ...] = (),
        log: Path | None = None,
        file: Path | None = None,
    ) -> None:
        self.armed = armed
        self._log = log
        self._file = file
        self._file_version = (0, 0)

    @classmethod
    def from_environment(cls) -> "Failpoints":
        """The points that the environment of this process arms. Raises `ConfigError`."""
        log = os.environ.get(LOG_VARIABLE)
        text = os.environ.get(VARIABLE, "")
        file = Path(text[1:]) if text.startswith("@") else None
        return cls(() if file else parse(text), Path(log) if log else None, file)

    def find(self, name: str, rank: int | None, iteration: int | None) -> Armed | None:
        """The entry that this moment matches and that has not fired yet."""
        if self._file is not None:
            self._read_again(self._file)
        for entry in self.armed:
            if (
                entry.name == name
                and entry.rank in (None, rank)
                and entry.iteration in (None, iteration)
                and not self._fired(entry)
            ):
                return entry
        return None

    def hit(self, name: str, *, rank: int | None = None, iteration: int | None = None) -> None:
        """Fire if armed for this moment. ``iteration`` is the one in progress (committed + 1)."""
        if not self.armed and self._file is None:
            return
        entry = self.find(name, rank, iteration)
        if entry is not None:
            self.fire(entry, rank=rank, iteration=iteration)

    def fire(self, entry: Armed, *, rank: int | None, iteration: int | None) -> None:
        """Do what the entry says, after it is on record. Raises `InjectedFault` for ``raise``."""
        self._record(entry, rank, iteration)
        match entry.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise InjectedFault(
                    f"failpoint {entry} fired at rank {rank}, iteration {iteration}"
                )
            case "sleep":
                time.sleep(entry.seconds)
            case _:
                assert_never(entry.action)

    def _read_again(self, file: Path) -> None:
        try:
            stat = file.stat()
        except FileNotFoundError:
            return
        version = (stat.st_mtime_ns, stat.st_size)
        if version != self._file_version:
            self._file_version = version
            self.armed = parse(file.read_text())

    def _fired(self, entry: Armed) -> bool:
        if self._log is None or not self._log.exists():
            return False
        lines = self._log.read_text().splitlines()
        return any(line.split(" ", 1)[0] == str(entry) for line in lines)

    def _record(self, entry: Armed, rank: int | None, iteration: int | None) -> None:
        if self._log is None:
            self.armed = tuple(e for e in self.armed if e is not entry)
            return
        with self._log.open("a") as file:
            file.write(f"{entry} pid={os.getpid()} rank={rank} iteration={iteration}\n")
            file.flush()
            os.fsync(file.fileno())
