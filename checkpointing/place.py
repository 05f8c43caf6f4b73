"""Look at a checkpoint URL for a supervisor, which loads no backend: ``python -m
rallypoint.checkpointing.place URL [CREDENTIALS_FILE]`` prints a `Survey`."""

import contextlib
import heapq
import sys
from collections.abc import Iterable
from typing import Final

import msgspec

from rallypoint.checkpointing.errors import CheckpointError, NoContainer, UnsupportedUrl
from rallypoint.checkpointing.manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    decode,
    parse_directory_name,
)
from rallypoint.checkpointing.opening import open_storage
from rallypoint.checkpointing.probe import refuses_second_create
from rallypoint.checkpointing.storage import Storage
from rallypoint.daemon.shared.survey import Survey

_LOOKED_INTO: Final = 10
"""Of so many checkpoints, the newest ones, the job is read."""


def survey(storage: Storage) -> Survey:
    """Prove the store, and see what is there."""
    try:
        words = refuses_second_create(storage)
        listed = storage.list(lambda name: parse_directory_name(name) is not None)
    except (PermissionError, FileNotFoundError, NotADirectoryError, NoContainer) as error:
        return Survey(verdict="refused", words=f"{storage.root}: {error}")
    except OSError as error:
        return Survey(verdict="unreachable", words=f"{storage.root}: {error}")
    numbers = {name: parsed for name in listed if (parsed := parse_directory_name(name))}
    committed = [(n[1], n[0], name) for name, n in numbers.items() if MANIFEST_FILE in listed[name]]
    newest = max(committed)[2] if committed else None
    return Survey(
        verdict="unconditional" if words else "good",
        words=words,
        holds=None if newest is None else f"{storage.root}/{newest}",
        jobs=_jobs(storage, [name for *_, name in heapq.nlargest(_LOOKED_INTO, committed)]),
        generation=max((generation for _, generation, _ in numbers.values()), default=0),
    )


def _jobs(storage: Storage, directories: Iterable[str]) -> tuple[str, ...]:
    """The jobs of these checkpoints, without those whose manifest cannot be read: workers will say why."""
    found: set[str] = set()
    for directory in directories:
        with contextlib.suppress(OSError, CheckpointError):
            with storage.open(directory, MANIFEST_FILE) as file:
                data = file.read(MAX_MANIFEST_BYTES + 1) or b""
            found.add(decode(data, f"{storage.root}/{directory}").job)
    return tuple(sorted(found))


def main(url: str, credentials_file: str | None = None) -> Survey:
    """What is at ``url``; refused for a URL that cannot be used."""
    try:
        return survey(open_storage(url, credentials_file))
    except UnsupportedUrl as error:
        return Survey(verdict="refused", words=str(error))


if __name__ == "__main__":
    print(msgspec.json.encode(main(*sys.argv[1:])).decode())
