"""The progress of a run in one line: rewritten in place on a terminal, printed now and then elsewhere."""

import asyncio
import shutil
import time
from collections import deque
from typing import Any, Final, TextIO

from rallypoint.daemon.executors.supervisor import Supervisor

_TERMINAL_EVERY_S: Final = 1.0
_PLAIN_EVERY_S: Final = 5.0
_PACE_WINDOW_S: Final = 10.0
_CLEAR: Final = "\r\x1b[2K"


class LiveLine:
    """A line at the bottom of a terminal, which other text can be written above."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._line = ""

    def show(self, line: str) -> None:
        """Replace the line; "" removes it."""
        self._line = line[: shutil.get_terminal_size().columns - 1]  # a wrapped line stays behind
        self._terminal.write(f"{_CLEAR}{self._line}")
        self._terminal.flush()

    # What a log stream needs.

    def write(self, text: str) -> int:
        """Write text above the line."""
        self._terminal.write(f"{_CLEAR}{text}")
        if text.endswith("\n"):
            self._terminal.write(self._line)
        return len(text)

    def flush(self) -> None:
        self._terminal.flush()

    def isatty(self) -> bool:
        return True


class Pace:
    """Env steps a second over the last few seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def take(self, now: float, env_steps: int) -> float | None:
        """The pace at monotonic time ``now``; None while there is nothing to compare with."""
        if self._seen and env_steps < self._seen[-1][1]:
            self._seen.clear()  # restored from a checkpoint: begin anew
        self._seen.append((now, env_steps))
        while len(self._seen) > 2 and now - self._seen[0][0] > _PACE_WINDOW_S:
            self._seen.popleft()
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None


async def show(supervisor: Supervisor, out: TextIO, live: LiveLine | None) -> None:
    """Show the progress until cancelled."""
    pace = Pace()
    figures: dict[str, float] = {}  # newest of each: no episode may have ended in an iteration
    while True:
        status = supervisor.status()
        figures |= supervisor.recorder.figures
        line = describe(
            status,
            figures,
            pace.take(time.monotonic(), status["env_steps"]),
            supervisor.config.job.iterations,
        )
        if live is not None:
            live.show(line)
            await asyncio.sleep(_TERMINAL_EVERY_S)
        else:
            try:
                out.write(f"{line}\n")
                out.flush()
            except OSError:
                return  # nobody reads it any more; the run goes on
            await asyncio.sleep(_PLAIN_EVERY_S)


def describe(
    status: dict[str, Any], figures: dict[str, float], pace: float | None, iterations: int | None
) -> str:
    """Iteration, return, env steps a second, world size, generation, last recovery."""
    if status["generation"] is None:
        states = ", ".join(worker["state"] for worker in status["workers"])
        return f"{status['state']}: {states}"
    of = "" if iterations is None else f"/{iterations}"
    parts = [f"iteration {status['iteration']}{of}"]
    value = final_return(figures)
    parts.append("return -" if value is None else f"return {value:.2f}")
    parts.append("- env-steps/s" if pace is None else f"{pace:,.0f} env-steps/s")
    parts.append(f"world size {status['world_size']}, generation {status['generation']}")
    change = status["last_change"]
    if change["cause"] != "start" and change["seconds"]["total"] is not None:
        parts.append(f"last recovery {change['seconds']['total']:.2f} s ({change['cause']})")
    if status["state"] != "running":
        parts.append(status["state"])
    return " | ".join(parts)


def final_return(figures: dict[str, float]) -> float | None:
    """Mean return of the episodes that ended in the newest iteration, where any did."""
    return figures.get("episode_return_mean")
