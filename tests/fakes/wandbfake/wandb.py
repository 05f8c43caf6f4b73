"""Stands in for the client library of Weights & Biases: writes what it is told into a file."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Run:
    """As the real one, it refuses to go back."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._step = -1

    def write(self, **line: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), **line}) + "\n")

    def log(self, data: Mapping[str, float], *, step: int) -> None:
        if step <= self._step:
            raise RuntimeError(f"step {step} after step {self._step}")
        self._step = step
        self.write(event="log", step=step, data=dict(data))

    def finish(self) -> None:
        self.write(event="finish")


def init(**settings: Any) -> Run:
    run = Run(Path(settings["dir"]) / "told.jsonl")
    run.write(event="init", **settings)
    return run
