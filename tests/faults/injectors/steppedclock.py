"""A calendar clock that can be stepped, for the processes of one node: the machine's own is not touched."""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")


class SteppedClock:
    """The clock of processes that are started under `environment`. A library that stands before the C
    library adds the step to every answer about the calendar time (Python's and that of grpc and torch
    alike). The monotonic clock, which rules every decision, and what the kernel itself does with calendar
    time (timestamps of files, waits until a calendar time) stay the machine's."""

    def __init__(self, directory: Path) -> None:
        """Builds the library in ``directory``; skips the test where there is no compiler."""
        compiler = shutil.which("tcc") or shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler is installed: apt-get install tcc")
        self._library = directory / "steppedclock.so"
        self._step = directory / "step"
        command = [compiler, "-shared", "-nostdlib", "-fPIC", "-o", str(self._library), str(SOURCE)]
        subprocess.run(command, check=True, timeout=60)
        self.step(0)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the processes whose clock it is."""
        return {"LD_PRELOAD": str(self._library), "CLOCK_STEP_FILE": str(self._step)}

    def step(self, seconds: int) -> None:
        """Put the clock this far from the machine's, at once."""
        mode = "r+b" if self._step.exists() else "wb"
        with self._step.open(mode) as file:
            file.write(struct.pack("=q", seconds))
