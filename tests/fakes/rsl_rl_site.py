"""RSL-RL for tests, in a folder of its own beside torch: installed once, and kept in the directory for
temporary files; nothing else sees it."""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PACKAGES = ("rsl-rl-lib==5.5.1", "tensordict==0.15.3", "cloudpickle==3.1.3", "pyvers==0.2.3")


def installed() -> Path:
    """The folder with RSL-RL and what it imports. Skips where it cannot be installed."""
    folder = Path(tempfile.gettempdir()) / f"rallypoint-tests-{os.getuid()}" / "-".join(PACKAGES)
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "complete"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of this session may be at it
        if not done.exists():
            command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target"]
            installed = subprocess.run(
                [*command, str(folder / "site"), *PACKAGES],
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )
            if installed.returncode:
                pytest.skip(f"RSL-RL cannot be installed: {installed.stderr.strip()[-300:]}")
            done.touch()
    return folder / "site"
