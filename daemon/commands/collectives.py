"""``rallypoint config --collectives``: every collective of the configured job, with its bytes."""

import subprocess
import sys
from typing import Final

import msgspec

from rallypoint.daemon.shared import configload, envbudget
from rallypoint.daemon.shared.collectives import WHEN, Sizes, of_job
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.errors import RallypointError

_TIMEOUT_S: Final = 120.0


class SizesError(RallypointError):
    """The sizes of a job's collectives could not be found; the message says what was tried."""


def find_sizes(config: Config) -> Sizes:
    """Sizes of this job, found by a process that builds its networks and its env: this one loads no
    torch. Raises `SizesError`."""
    command = [sys.executable, "-m", "rallypoint.trainer.sizes"]
    try:
        found = subprocess.run(
            command,
            input=configload.to_json(config),
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SizesError(f"the sizes were not found within {_TIMEOUT_S:g} s") from error
    if found.returncode:
        last = found.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise SizesError(f"the sizes of task {config.env.task!r}: {''.join(last)}")
    return msgspec.json.decode(found.stdout, type=Sizes)


def table_text(config: Config, sizes: Sizes) -> str:
    """The registry as text, for the greatest world size of the job."""
    world_size = envbudget.world_size_range(config)[1]
    dtypes = {"parameters": config.ppo.dtype}
    entries = of_job(config)
    rows = [("collective", "when", "operation", "dtype", "bytes in", "bytes out", "what")]
    rows += [
        (
            entry.name,
            WHEN[entry.when],
            entry.operation,
            dtypes.get(entry.dtype, entry.dtype),
            f"{entry.size_bytes(sizes):,}",
            f"{entry.result_bytes(sizes, world_size):,}",
            entry.meaning,
        )
        for entry in entries
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if 4 <= column <= 5 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    calls = sum(entry.calls(sizes) for entry in entries)
    volume = sum(entry.calls(sizes) * entry.size_bytes(sizes) for entry in entries)
    return "\n".join(
        [
            f"task {config.env.task}, {world_size} workers, {sizes.mini_batches} mini-batches an iteration",
            *lines,
            f"an iteration: {calls} collectives, into which one rank puts {volume:,} bytes",
        ]
    )
