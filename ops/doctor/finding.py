"""What a check finds."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from rallypoint.daemon.shared.config import Config

Level = Literal["pass", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """One line of the result; ``--json`` prints these fields."""

    check: str
    level: Level
    text: str
    """What was found, with the numbers."""
    remedy: str = ""
    """What to do; "" where nothing is to be done."""


@dataclass(frozen=True)
class Patient:
    """What is looked at."""

    config: Config
    directory: Path
    """Of the run; need not be there yet."""
    runs: bool
    """A supervisor of this directory answers: its own ports are not free, and need not be."""


Check = Callable[[Patient], Iterable[Finding]]


def graded(
    check: str, text: str, *, fail: bool = False, warn: bool = False, remedy: str = ""
) -> Finding:
    """A finding whose level follows from what is wrong; the remedy is given only then."""
    level: Level = "fail" if fail else "warn" if warn else "pass"
    return Finding(check, level, text, "" if level == "pass" else remedy)
