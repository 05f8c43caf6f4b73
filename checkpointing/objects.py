"""Checkpoints on an fsspec file system: object stores, and memory.

A file is put whole by the backend's own conditional create, ``pipe_file(mode="create")``; a large one
streams in blocks, under a name that nobody else uses. No rename anywhere: in an object store that is a
copy and a removal.
"""

import contextlib
import importlib.util
import io
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import fsspec

from rallypoint.checkpointing.credentials import Credentials
from rallypoint.checkpointing.errors import NoContainer, UnsupportedUrl
from rallypoint.checkpointing.storage import Buffer, ReadableFile

BLOCK_BYTES: Final = 16 * 2**20
"""What is fetched at once, and sent at once of a large file."""

WHOLE_BYTES: Final = 128 * 2**20
"""The largest file that is put whole, and the most that `FsspecStorage` holds of one: blocks one after
another take half as long again (100 MB to an S3 server on the same machine)."""

PACKAGES: Final[Mapping[str, str]] = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
"""URL scheme, which is also the name of the extra -> package of its fsspec backend."""

for _package in PACKAGES.values():
    # They log what they also raise, with a traceback: without a handler it would be printed.
    logging.getLogger(_package).addHandler(logging.NullHandler())

_NOT_PERMITTED: Final = frozenset(
    {
        *("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError"),  # botocore
        *("DefaultCredentialsError", "RefreshError"),  # google.auth
        *("ClientAuthenticationError", "CredentialUnavailableError"),  # azure
    }
)
"""Errors of the backends' own libraries that mean: who are you?"""

_NOT_FOUND: Final = frozenset({"ResourceNotFoundError"})  # azure


class FsspecStorage:
    """A root on an fsspec file system. For one thread at a time, in any process."""

    def __init__(self, url: str, credentials: Credentials | None = None) -> None:
        """Touches nothing. Raises `UnsupportedUrl`, naming the extra, when the backend is absent."""
        self._url = url.rstrip("/")
        self._scheme = url.partition("://")[0]
        self._credentials = credentials or Credentials(None)
        self._connected: tuple[tuple[int, Mapping[str, Any]], Any, str] | None = None
        # A file in memory shows what is written at once; so it is put whole.
        self._whole_bytes = sys.maxsize if self._scheme == "memory" else WHOLE_BYTES
        package = PACKAGES.get(self._scheme)
        if package and importlib.util.find_spec(package) is None:
            raise UnsupportedUrl(
                f"checkpoint URL {url!r} needs the package {package}: "
                f"pip install 'rallypoint[{self._scheme}]'"
            )

    @property
    def root(self) -> str:
        return self._url

    def claim(self, directory: str) -> None:
        return None

    def create(self, directory: str, name: str, parts: Iterable[Buffer]) -> None:
        remaining = iter(parts)
        head: list[Buffer] = []
        for part in remaining:
            head.append(part)
            if sum(map(len, head)) > self._whole_bytes:
                self._stream(directory, name, itertools.chain(head, remaining))
                return
        self._require_free(directory, name)
        self.put_if_absent(directory, name, b"".join(head))

    def put_if_absent(self, directory: str, name: str, data: bytes) -> None:
        with self._translated():
            fs, path = self._locate(directory, name)
            try:
                with self._translated():
                    fs.pipe_file(path, data, mode="create")
            except FileNotFoundError as error:  # of a file that is being made: what is it in?
                raise NoContainer(
                    f"there is no bucket or container {self._url}: {error}"
                ) from error
            except FileExistsError:
                # The answer to a put may be lost: the client tries again, and meets its own first.
                if fs.cat_file(path) != data:
                    raise

    def open(self, directory: str, name: str) -> ReadableFile:
        with self._translated():
            fs, path = self._locate(directory, name)
            file = fs.open(path, "rb", block_size=BLOCK_BYTES, cache_type="readahead")
            return _Readable(file, self._translated)

    def list(self, wanted: Callable[[str], bool]) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        with self._translated():
            fs, base = self._connect()
            fs.invalidate_cache()
            for path, details in fs.find(base, detail=True).items():
                directory, _, name = path[len(base) + 1 :].partition("/")
                if name and wanted(directory):
                    found.setdefault(directory, {})[name] = details["size"]
        return found

    def remove(self, directory: str, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError), self._translated():
                fs, path = self._locate(directory, name)
                fs.rm_file(path)

    def _require_free(self, directory: str, name: str) -> None:
        """What is left of a condition where the backend does not honour its own."""
        with self._translated():
            fs, path = self._locate(directory, name)
            if fs.exists(path):
                raise FileExistsError(f"{self._url}/{directory}/{name} exists")

    def _stream(self, directory: str, name: str, parts: Iterable[Buffer]) -> None:
        self._require_free(directory, name)
        with self._translated():
            fs, path = self._locate(directory, name)
            file = fs.open(path, "wb", block_size=BLOCK_BYTES)
        try:
            for part in parts:  # errors of their maker are not the store's
                with self._translated():
                    file.write(part)
            with self._translated():
                file.close()
        except BaseException:  # whatever it is, half a file must not become one
            _abandon(file)
            raise

    def _locate(self, directory: str, name: str) -> tuple[Any, str]:
        fs, base = self._connect()
        return fs, f"{base}/{directory}/{name}"

    def _connect(self) -> tuple[Any, str]:
        """The file system and our path on it; another one after a fork, or when the credentials have
        changed. No listing is cached: others write here too."""
        key = os.getpid(), self._credentials.options()
        if self._connected is None or self._connected[0] != key:
            fs, base = fsspec.core.url_to_fs(
                self._url, skip_instance_cache=True, use_listings_cache=False, **key[1]
            )
            self._connected = key, fs, base.rstrip("/")
        return self._connected[1:]

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Every error of the backend as an OSError."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:  # each backend's library has kinds of its own
            kind = type(error).__name__
            words = self._credentials.redacted(f"{kind}: {error}")
            if kind in _NOT_PERMITTED or getattr(error, "code", None) in (401, 403):
                raise PermissionError(words) from error
            raise (FileNotFoundError if kind in _NOT_FOUND else OSError)(words) from error


class _Readable(io.RawIOBase):
    """A file of a backend, whose errors are OSErrors."""

    def __init__(
        self, file: Any, translated: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        super().__init__()
        self._file = file
        self._translated = translated

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        with self._translated():
            position: int = self._file.seek(offset, whence)
            return position

    def readinto(self, buffer: Any, /) -> int:
        with self._translated():
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            with self._translated():
                self._file.close()


def _abandon(file: Any) -> None:
    """Close a file that is half written so that nobody ever sees it: fsspec's own close would
    complete it."""
    with contextlib.suppress(Exception):  # what cannot be discarded was never visible
        file.discard()
    file.closed = True
