"""Checks of the machine: clock, disk, shared memory, limits, cores."""

import ctypes
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rallypoint.ops.doctor.finding import Finding, Patient, graded

_GIB: Final = 2**30
_LEAST_FREE_BYTES: Final = _GIB
_GOOD_FREE_BYTES: Final = 10 * _GIB
_LEAST_FILES: Final = 1024
_GOOD_FILES: Final = 4096
_LEAST_SHM_BYTES: Final = 256 * 2**20
_SHM: Final = Path("/dev/shm")  # noqa: S108 - its room is looked at, nothing is put there
_FABRIC: Final = Path("/sys/class/infiniband")
_TIMEX_BYTES: Final = 512
"""More than ``struct timex`` has on any Linux; only its first word, ``modes`` = 0, is set."""
_TIME_ERROR: Final = 5
"""Return value of adjtimex(2): the clock is not synchronised."""


def clock(_: Patient) -> Iterator[Finding]:
    """Whether the kernel's clock is disciplined. No decision compares clocks of two machines, but people
    compare logs, and certificates and tokens expire."""
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    if state < 0:
        text = f"adjtimex: {os.strerror(ctypes.get_errno())}"
        yield graded("clock", text, warn=True, remedy="look at the clock by hand")
        return
    yield graded(
        "clock",
        "not synchronised" if state == _TIME_ERROR else "synchronised",
        warn=state == _TIME_ERROR,
        remedy="run chrony or systemd-timesyncd",
    )


def disk(patient: Patient) -> Iterator[Finding]:
    """Room and permission where the run's directory is, or is about to be."""
    place = patient.directory.absolute()
    while not place.exists():
        place = place.parent
    usage = shutil.disk_usage(place)
    text = f"{usage.free / _GIB:.1f} GiB free of {usage.total / _GIB:.1f} at {place}"
    yield graded(
        "disk",
        text,
        fail=usage.free < _LEAST_FREE_BYTES,
        warn=usage.free < _GOOD_FREE_BYTES,
        remedy="make room, or give --dir on another disk",
    )
    writable = os.access(place, os.W_OK | os.X_OK)
    yield graded(
        "disk",
        f"{place} is {'' if writable else 'not '}writable for user {os.getuid()}",
        fail=not writable,
        remedy="change its owner, or give another --dir",
    )


def shared_memory(patient: Patient) -> Iterator[Finding]:
    """NCCL puts its rings there, and the backup of env rows is there."""
    free = shutil.disk_usage(_SHM).free if _SHM.is_dir() else 0
    matters = patient.config.node.devices is not None
    yield graded(
        "shared memory",
        f"{free / 2**20:.0f} MiB free in /dev/shm",
        warn=matters and free < _LEAST_SHM_BYTES,
        remedy="in a container: --shm-size=1g, or an emptyDir of medium Memory at /dev/shm",
    )


def limits(patient: Patient) -> Iterator[Finding]:
    """Open files; locked memory where there is InfiniBand."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = files == resource.RLIM_INFINITY
    yield graded(
        "limits",
        f"{'any number of' if endless else files} open files",
        fail=not endless and files < _LEAST_FILES,
        warn=not endless and files < _GOOD_FILES,
        remedy=f"raise it to {_GOOD_FILES} (ulimit -n, or LimitNOFILE= of the unit)",
    )
    fabric = patient.config.node.devices is not None and _FABRIC.is_dir()
    if fabric and any(_FABRIC.iterdir()):
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        unlimited = locked == resource.RLIM_INFINITY
        yield graded(
            "limits",
            f"{'all' if unlimited else locked // 1024} {'' if unlimited else 'KiB of '}memory may be locked",
            warn=not unlimited,
            remedy="InfiniBand needs ulimit -l unlimited (LimitMEMLOCK=infinity of the unit)",
        )


def cores(patient: Patient) -> Iterator[Finding]:
    """A core for each worker."""
    count, workers = len(os.sched_getaffinity(0)), patient.config.node.workers
    yield graded(
        "cores",
        f"{count} CPU cores for {workers} workers",
        warn=count < workers,
        remedy=f"lower node.workers to {count}, or give this process more cores",
    )
