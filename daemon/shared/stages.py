"""Where a worker's start is, in words: a file of its slot, for people.

The worker writes it before it can speak to its supervisor; ``rallypoint status`` reads it.
"""

import contextlib
from pathlib import Path


def write_stage(path: Path, incarnation: int, stage: str) -> None:
    """This life of a slot has come to this stage; "" when it builds nothing any more."""
    # A worker does not end for want of room to say what it does; its log says it too.
    with contextlib.suppress(OSError):
        path.write_text(f"{incarnation} {stage}")


def read_stage(path: Path, incarnation: int) -> str:
    """The stage of this life of a slot; "" where it has none."""
    try:
        life, _, stage = path.read_text().partition(" ")
    except OSError:
        return ""
    return stage if life == str(incarnation) else ""
