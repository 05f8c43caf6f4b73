"""Writing a result: the whole file or none."""

import os
import tempfile
from pathlib import Path

from rallypoint.trainer.policies.errors import OutputError


def put_in_place(data: bytes, path: Path) -> None:
    """Make ``path``, and its parents, or replace it at once. Raises `OutputError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            file.write(data)
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from error
