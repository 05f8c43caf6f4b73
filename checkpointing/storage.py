"""Where checkpoints lie: the few storage operations that the commit protocol needs.

Files never change once created, and creating one is conditional: it succeeds for one writer only.
All errors are `OSError`, as the operating system and fsspec raise them.
"""

import contextlib
import errno
import io
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

Buffer = bytes | memoryview
ReadableFile = io.RawIOBase | io.BufferedIOBase

_TEMPORARY: Final = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp")


class Storage(Protocol):
    """Directories of files below one root, one level deep."""

    @property
    def root(self) -> str:
        """Path or URL of the root, without a slash at its end."""
        ...

    def claim(self, directory: str) -> None:
        """Make the directory, where a storage has such. Raises FileExistsError when it is there."""
        ...

    def create(self, directory: str, name: str, parts: Iterable[Buffer]) -> None:
        """Make a file out of ``parts`` in a claimed directory; when this returns it is durable, and
        nobody ever sees part of it. Raises FileExistsError, and changes nothing, when there is one
        of that name."""
        ...

    def put_if_absent(self, directory: str, name: str, data: bytes) -> None:
        """As `create`, by the store's own condition alone, which `probe` puts to the proof."""
        ...

    def open(self, directory: str, name: str) -> ReadableFile:
        """The file, for reading from its beginning; seekable. Raises FileNotFoundError."""
        ...

    def list(self, wanted: Callable[[str], bool]) -> dict[str, dict[str, int]]:
        """Directory -> file -> size in bytes, of the directories whose name is ``wanted``; empty
        when the root does not exist."""
        ...

    def remove(self, directory: str, names: Iterable[str]) -> None:
        """Remove these files in this order, then the directory if nothing else is in it."""
        ...


class LocalStorage:
    """A directory of a POSIX file system with hard links (local disk, NFS)."""

    def __init__(self, root: Path) -> None:
        self._root = root.expanduser().absolute()

    @property
    def root(self) -> str:
        return str(self._root)

    def claim(self, directory: str) -> None:
        _make_directory(self._root)
        (self._root / directory).mkdir()
        _sync_directory(self._root)

    def create(self, directory: str, name: str, parts: Iterable[Buffer]) -> None:
        """As `Storage.create`: temporary file, fsync, hard link (which fails if the name is taken),
        fsync of the directory."""
        folder = self._root / directory
        temporary = folder / f".{name}.{secrets.token_hex(8)}.tmp"
        try:
            with temporary.open("xb", buffering=0) as file:
                for part in parts:
                    _write_all(file.fileno(), part)
                os.fsync(file.fileno())
            os.link(temporary, folder / name)
        finally:
            # A leftover is only litter: it is collected with its directory.
            with contextlib.suppress(OSError):
                temporary.unlink()
        _sync_directory(folder)

    def put_if_absent(self, directory: str, name: str, data: bytes) -> None:
        self.create(directory, name, (data,))

    def open(self, directory: str, name: str) -> ReadableFile:
        return (self._root / directory / name).open("rb", buffering=0)

    def list(self, wanted: Callable[[str], bool]) -> dict[str, dict[str, int]]:
        if not self._root.exists():
            return {}
        with os.scandir(self._root) as entries:
            folders = [e for e in entries if wanted(e.name) and e.is_dir(follow_symlinks=False)]
        return {folder.name: _sizes(folder.path) for folder in folders}

    def remove(self, directory: str, names: Iterable[str]) -> None:
        folder = self._root / directory
        for name in names:
            (folder / name).unlink(missing_ok=True)
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()


def own_files(files: Mapping[str, int], known: Iterable[str]) -> list[str]:
    """Those of ``files`` that are in ``known`` or are the unfinished form of one that is, in the
    order of ``known``: what a checkpoint's writer made, nothing that somebody else put there."""
    unfinished = {name: match[1] for name in files if (match := _TEMPORARY.fullmatch(name))}
    found: list[str] = []
    for target in known:
        found += [target] if target in files else []
        found += sorted(name for name, of in unfinished.items() if of == target)
    return found


def _sizes(path: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    # Another process may be removing this checkpoint meanwhile.
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    return sizes


def _make_directory(path: Path) -> None:
    """Make ``path`` and its parents, each durable in its own parent."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    try:
        path.mkdir(exist_ok=True)
    except FileExistsError as error:  # `Storage.claim` means something else by it
        raise NotADirectoryError(errno.ENOTDIR, "is a file, not a directory", str(path)) from error
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: Buffer) -> None:
    view = memoryview(data)
    while view.nbytes:
        view = view[os.write(descriptor, view) :]
