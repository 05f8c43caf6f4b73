"""Pictures of pages, by a Chromium without a window."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from rallypoint.daemon.shared.errors import RallypointError

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")
_RUN_S: Final = 120.0


class ChromiumError(RallypointError):
    """There is none, or it drew nothing."""


def find() -> str:
    """The program. Raises `ChromiumError` when there is none."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        raise ChromiumError(
            f"pictures need Chromium, and none of {', '.join(_NAMES)} is in PATH: apt-get install"
            " chromium; the pages are written, and any browser shows them"
        )
    return found


def screenshot(program: str, page: Path, picture: Path, size: tuple[int, int]) -> None:
    """Write ``picture`` (PNG) of a page of this size (pixels). Raises `ChromiumError`."""
    with tempfile.TemporaryDirectory(prefix="rallypoint-chromium-") as profile:
        command = [
            *(program, "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update"),
            *("--disable-dev-shm-usage", "--force-device-scale-factor=1"),
            *(f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"),
            *(f"--screenshot={picture.absolute()}", page.absolute().as_uri()),
        ]
        if os.geteuid() == 0:
            command.insert(1, "--no-sandbox")  # refuses to run as root without
        try:
            done = subprocess.run(command, check=False, capture_output=True, timeout=_RUN_S)
        except subprocess.TimeoutExpired as error:
            raise ChromiumError(f"{program} did not end within {_RUN_S:g} s on {page}") from error
    if done.returncode != 0 or not picture.is_file():
        said = done.stderr.decode(errors="replace").strip()[-300:]
        raise ChromiumError(
            f"{program} made no picture of {page} (exit code {done.returncode}): {said}"
        )
