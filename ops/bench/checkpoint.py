"""``rallypoint bench checkpoint``: how long the loop stands still for a checkpoint, how long it takes to
be durable, and the memory; beside a raw copy, ``torch.save`` and DCP's ``async_save``.

To a local directory, and to an S3 server (moto, on this machine) or a given URL.
"""

import contextlib
import importlib.util
import re
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import fsspec
import msgspec

from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.ops.bench import processes
from rallypoint.ops.bench.processes import BenchError

METHODS: Final = ("raw copy", "ours", "torch.save", "DCP async_save")
"""Ours right after what it is held against: the load of a machine changes."""
STALL_GOAL: Final = 0.01
"""Of an iteration, on the CPU."""
CUDA_STALL_GOAL_S: Final = 0.01
"""For 100 MB, where the state lives on a GPU."""
PERSIST_GOAL: Final = 1.2
"""Times a raw copy."""
_BUCKET: Final = "bench"
_START_S: Final = 60.0
_UNITS: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Row:
    """One method at one place; medians over saves."""

    place: str
    method: str
    stall_s: float
    persist_s: float
    peak_extra_bytes: int
    state_bytes: int
    iteration_s: float | None


def parse_size(text: str) -> int:
    """Bytes, from ``100MB``. Raises `ConfigError` for what is no size."""
    match = re.fullmatch(r"(\d+)(KB|MB|GB)", text)
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"--size {text!r}: a number and KB, MB or GB, such as 100MB")
    return int(match[1]) * _UNITS[match[2]]


def measure(
    directory: Path,
    size_bytes: int,
    *,
    saves: int,
    device: str,
    url: str | None,
    on_row: Callable[[Row], None],
) -> list[Row]:
    """All methods at all places, each in a process of its own; ``on_row`` hears of each at once.
    Raises `BenchError`."""
    local = directory / "local"
    local.mkdir()
    with contextlib.ExitStack() as stack:
        places: dict[str, tuple[str, dict[str, str]]] = {"local": (str(local), {})}
        if url is not None:
            places[url] = (url, {})
        elif importlib.util.find_spec("moto") is not None:
            places["S3 (moto)"] = stack.enter_context(_moto(directory))
        rows = []
        for name, (place, environment) in places.items():
            for row in _rows(directory, name, place, environment, (size_bytes, saves, device)):
                rows.append(row)
                on_row(row)
        return rows


def _rows(
    directory: Path,
    name: str,
    place: str,
    environment: Mapping[str, str],
    parameters: tuple[int, int, str],
) -> Iterator[Row]:
    """Of every method at one place, as they end."""
    log = directory / "saves.log"
    command = [sys.executable, "-m", "rallypoint.ops.bench.checkpoint_run", place]
    command += [*map(str, parameters), *METHODS]
    extra = {"TMPDIR": str(directory), **environment}
    process = processes.start(command, log, extra, pipes=True)
    try:
        lines = iter(process.stdout or ())
        for method, line in zip(METHODS, lines, strict=False):
            yield _row(name, method, msgspec.json.decode(line))
        if process.wait():
            raise BenchError(
                f"saves to {place} ended with {process.returncode}:\n{log.read_text()}"
            )
    finally:
        processes.end(process, 5.0)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _row(place: str, method: str, took: Any) -> Row:
    return Row(
        place=place,
        method=method,
        stall_s=statistics.median(took["stall_s"]),
        persist_s=statistics.median(took["persist_s"]),
        peak_extra_bytes=took["peak_extra_bytes"],
        state_bytes=took["state_bytes"],
        iteration_s=took["iteration_s"],
    )


@contextlib.contextmanager
def _moto(directory: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """(URL of a bucket, variables that lead to it) of an S3 server on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = processes.start(command, directory / "moto.log")
    try:
        endpoint = f"http://127.0.0.1:{port}"
        keys = {"key": "bench", "secret": "bench-secret"}
        _wait_for(port, server.poll)
        fsspec.filesystem("s3", endpoint_url=endpoint, **keys).mkdir(_BUCKET)
        names = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        yield f"s3://{_BUCKET}", dict(zip(names, (endpoint, *keys.values()), strict=True))
    finally:
        processes.end(server, 5.0)


def _wait_for(port: int, ended: Any) -> None:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s and ended() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise BenchError(f"moto does not listen on port {port} within {_START_S:g} s")


def document(rows: Sequence[Row], about: Mapping[str, Any]) -> dict[str, Any]:
    """The result as JSON: every row, and ours against the goals."""
    raw = {row.place: row for row in rows if row.method == "raw copy"}
    ours = [row for row in rows if row.method == "ours"]
    return {
        **about,
        "rows": [msgspec.to_builtins(row) for row in rows],
        "goals": [
            {
                "place": row.place,
                "stall_s_per_100_mb": row.stall_s * 10**8 / row.state_bytes,
                "stall_of_iteration": row.stall_s / row.iteration_s if row.iteration_s else None,
                "persist_of_raw_copy": row.persist_s / raw[row.place].persist_s,
            }
            for row in ours
        ],
    }


def text(found: Mapping[str, Any]) -> str:
    """The result as a table."""
    lines = [f"{'place':12} {'method':16} {'stall':>9} {'persist':>9} {'extra memory':>13}"]
    lines += [row_text(msgspec.convert(row, Row)) for row in found["rows"]]
    for goal in found["goals"]:
        lines.append(
            f"{goal['place']}: {_stall(goal, found['device'])}; persisted in "
            f"{goal['persist_of_raw_copy']:.2f} times a raw copy "
            f"({_verdict(goal['persist_of_raw_copy'], PERSIST_GOAL, f'{PERSIST_GOAL}')})"
        )
    return "\n".join(lines)


def _stall(goal: Mapping[str, Any], device: str) -> str:
    """An iteration of a GPU has no usual length: there the time itself is the goal."""
    size_s, share = goal["stall_s_per_100_mb"], goal["stall_of_iteration"]
    per_size = f"stall {1000 * size_s:.1f} ms per 100 MB"
    if device == "cuda":
        verdict = _verdict(size_s, CUDA_STALL_GOAL_S, f"{1000 * CUDA_STALL_GOAL_S:g} ms")
        return f"{per_size} ({verdict})"
    shown = f", {100 * share:.2f} % of an iteration" if share is not None else ""
    return f"{per_size}{shown} ({_verdict(share, STALL_GOAL, f'{100 * STALL_GOAL:g} %')})"


def row_text(row: Row) -> str:
    """One line of the table."""
    return (
        f"{row.place[:12]:12} {row.method:16} {1000 * row.stall_s:6.1f} ms "
        f"{row.persist_s:7.3f} s {row.peak_extra_bytes / row.state_bytes:7.2f} states"
    )


def _verdict(value: float | None, goal: float, shown: str) -> str:
    if value is None:
        return f"goal {shown}"
    return f"goal {shown}: {'met' if value <= goal else 'missed'}"
