"""Credentials of a checkpoint store, from a file: read again for every operation, never shown."""

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

MAX_BYTES: Final = 2**16
DIRECTORY_VARIABLE: Final = "CREDENTIALS_DIRECTORY"
"""Set by systemd for a unit with ``LoadCredential=``."""
VARIABLE: Final = "RALLYPOINT_CHECKPOINT__CREDENTIALS_FILE"
"""The key ``checkpoint.credentials_file`` from the environment."""
_SHORTEST_SECRET: Final = 6
_KEY: Final = re.compile(r"(?:AccountKey|SharedAccessSignature)=([^;]+)")
"""Secrets within a connection string of Azure."""
_ENDPOINT: Final = re.compile(r"https?://[^@?]*")


def add_option(parser: argparse.ArgumentParser) -> None:
    """``--credentials-file`` of a command that works on a checkpoint URL, as ``args.credentials_file``."""
    parser.add_argument(
        "--credentials-file",
        metavar="FILE",
        default=os.environ.get(VARIABLE),
        help="JSON object with arguments of the URL's fsspec backend, or the name of a systemd "
        f"credential (default: ${VARIABLE}, else what the backend finds itself)",
    )


class Credentials:
    """Keyword arguments of an fsspec file system, as a JSON object in a file; none without a file,
    since backends find their own in the environment, in their files or at the cloud's metadata."""

    def __init__(self, file: str | None) -> None:
        """``file``: a path, or the name of a systemd credential."""
        self._file = file
        self._options: dict[str, Any] = {}

    def options(self) -> dict[str, Any]:
        """What the file says now. Raises OSError when it cannot be read or is no JSON object."""
        if self._file is None:
            return {}
        path = _locate(self._file)
        try:
            with path.open("rb") as file:
                self._options = msgspec.json.decode(file.read(MAX_BYTES), type=dict[str, Any])
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{path}: no such file of credentials; look at checkpoint.credentials_file, or at "
                "--credentials-file"
            ) from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            # Not the decoder's words: they may quote what is in the file.
            raise OSError(
                f"{path}: not a JSON object with arguments of the fsspec backend, such as "
                '{"key": "…", "secret": "…"}'
            ) from error.with_traceback(None)
        return self._options

    def redacted(self, text: str) -> str:
        """``text`` without any value of the file, but for endpoints."""
        for secret in sorted(_strings(self._options), key=len, reverse=True):
            if len(secret) >= _SHORTEST_SECRET and not _ENDPOINT.fullmatch(secret):
                text = text.replace(secret, "***")
        return text


def _locate(file: str) -> Path:
    directory = os.environ.get(DIRECTORY_VARIABLE)
    return Path(directory, file) if directory and "/" not in file else Path(file).expanduser()


def _strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
            yield from _KEY.findall(value)
        case dict():
            for inner in value.values():
                yield from _strings(inner)
        case list():
            for inner in value:
                yield from _strings(inner)
