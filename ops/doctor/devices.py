"""Checks of GPUs, driver, NCCL and the simulator, each in a process of its own: none of them can take
this one along."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

from rallypoint.daemon.commands.collectives import SizesError, find_sizes
from rallypoint.ops.doctor.finding import Finding, Patient, graded

_SMI_S: Final = 20.0
_TORCH_S: Final = 120.0
_HOT_C: Final = 85
_QUERY: Final = (
    "index",
    "name",
    "driver_version",
    "temperature.gpu",
    "memory.used",
    "memory.total",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending",
)
_TRY: Final = """
import json, sys
import torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": torch.cuda.device_count()}
found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
for device in map(int, sys.argv[1:]):
    ones = torch.ones(512, 512, device=f"cuda:{device}")
    assert float((ones @ ones).sum()) == 512.0**3, f"cuda:{device} computes wrongly"
print(json.dumps(found))
"""


def gpus(patient: Patient) -> Iterator[Finding]:
    """Driver and health, as ``nvidia-smi`` has them, of the devices of ``node.devices``."""
    devices = patient.config.node.devices
    if devices is None:
        yield graded("gpu", "node.devices is not set: workers run on the CPU")
        return
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        remedy = (
            "install the NVIDIA driver, or load it (nvidia-modprobe); in a container: its runtime"
        )
        yield graded("gpu", f"nvidia-smi: {error}", fail=True, remedy=remedy)
        return
    yield from judge_gpus(done.stdout, devices)


def judge_gpus(listing: str, devices: tuple[int, ...]) -> Iterator[Finding]:
    """What a listing of `_QUERY` says of these devices."""
    rows = {row["index"]: row for row in map(_row, listing.strip().splitlines())}
    for device in devices:
        row = rows.get(str(device))
        if row is None:
            text = (
                f"GPU {device} of node.devices is not there; there are {', '.join(rows) or 'none'}"
            )
            yield graded("gpu", text, fail=True, remedy="change node.devices")
            continue
        ecc, used, total = (_number(row[name]) for name in (_QUERY[6], _QUERY[4], _QUERY[5]))
        hot, pending = _number(row["temperature.gpu"]) > _HOT_C, row[_QUERY[7]] in ("Yes", "1")
        busy = total > 0 and used > total / 5
        yield graded(
            "gpu",
            f"GPU {device}: {row['name']}, driver {row['driver_version']}, {row['temperature.gpu']} °C, "
            f"{used:.0f} of {total:.0f} MiB used, {ecc:.0f} uncorrected memory errors"
            f"{', row remapping pending' if pending else ''}",
            fail=ecc > 0,
            warn=hot or pending or busy,
            remedy="uncorrected errors or pending rows: reset or replace it; hot: look at its cooling; "
            "memory in use: end who uses it",
        )


def _row(line: str) -> dict[str, str]:
    return dict(zip(_QUERY, (cell.strip() for cell in line.split(",")), strict=False))


def _number(text: str) -> float:
    """0 for what a GPU does not have (``[N/A]``)."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def torch_and_nccl(patient: Patient) -> Iterator[Finding]:
    """That torch loads and, with ``node.devices``, has CUDA and NCCL, and computes on each device."""
    devices = patient.config.node.devices
    command = [sys.executable, "-c", _TRY, *map(str, devices or ())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_S, check=True)
    except subprocess.TimeoutExpired:
        text = f"torch did not answer within {_TORCH_S:g} s"
        yield graded("torch", text, fail=True, remedy="a GPU may hang: look at dmesg for Xid lines")
        return
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or [f"exit code {error.returncode}"]
        remedy = "install torch, built for this machine's driver; then look at dmesg for Xid lines"
        yield graded("torch", last[0], fail=True, remedy=remedy)
        return
    found: dict[str, Any] = json.loads(done.stdout)
    yield graded("torch", f"torch {found['torch']}, CUDA {found['cuda'] or 'none'}")
    if devices is not None:
        nccl = found["nccl"]
        remedy = "install a torch with CUDA, whose CUDA this driver supports"
        yield graded("nccl", f"NCCL {nccl or 'is not there'}", fail=nccl is None, remedy=remedy)


def simulator(patient: Patient) -> Iterator[Finding]:
    """That the task's env and networks can be built."""
    task = patient.config.env.task
    try:
        find_sizes(patient.config)
    except SizesError as error:
        remedy = "install what the simulator needs (MuJoCo, its GL library), or change env.task"
        yield graded("simulator", str(error), fail=True, remedy=remedy)
    else:
        yield graded("simulator", f"env and networks of task {task!r} were built")
