"""Arming failpoints of a running job, and the proof that one fired."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from rallypoint.daemon.shared import failpoints


@dataclass(frozen=True)
class Fired:
    """One line of the failpoint log."""

    entry: str
    pid: int
    rank: int | None
    iteration: int | None


_LINE = re.compile(r"(\S+) pid=(\d+) rank=(\d+|None) iteration=(\d+|None)")


class Arming:
    """The failpoint file of a job and the log of what fired, both in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "failpoints"
        self._log = directory / "failpoints.fired"
        self._write("")

    @property
    def environment(self) -> dict[str, str]:
        """For the supervisor, which hands it on to its workers."""
        return {
            failpoints.VARIABLE: f"@{self._file}",
            failpoints.LOG_VARIABLE: str(self._log),
        }

    def arm(self, *entries: str) -> None:
        """Arm exactly these. The log starts anew, so that an entry may fire that has before; all
        were disarmed when that was seen, long before."""
        failpoints.parse(",".join(entries))
        self._log.unlink(missing_ok=True)
        self._write(",".join(entries))

    def disarm(self) -> None:
        self._write("")

    def fired(self) -> list[Fired]:
        """What has fired since the last `arm`."""
        if not self._log.exists():
            return []
        found = [_LINE.fullmatch(line) for line in self._log.read_text().splitlines()]
        return [
            Fired(m[1], int(m[2]), _number(m[3]), _number(m[4])) for m in found if m is not None
        ]

    def _write(self, text: str) -> None:
        """At once, so that no process reads half of it."""
        new = self._file.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self._file)


def _number(text: str) -> int | None:
    return None if text == "None" else int(text)
