"""The checkpoint store: commit, listing, verification, retention.

Commit protocol: data under a name that nobody else will ever use; then one question to the caller
(``may_commit``); then the manifest, by conditional create. A directory without a manifest does not
exist for readers. Readers order by (generation, iteration), so that the manifest of a writer that
was stopped between question and create never wins over those of later generations.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import msgspec
from torch import Tensor

from rallypoint.checkpointing import manifest as manifests
from rallypoint.checkpointing import tensorfile
from rallypoint.checkpointing.copying import copy_checkpoint
from rallypoint.checkpointing.errors import CheckpointError, CommitRefused, DamagedCheckpoint
from rallypoint.checkpointing.manifest import (
    MANIFEST_FILE,
    SCHEMA,
    SCOPES,
    STATE_FILE,
    CheckpointInfo,
    CheckpointMeta,
    EntryRecord,
    FileRecord,
    Manifest,
)
from rallypoint.checkpointing.opening import open_storage
from rallypoint.checkpointing.reading import (
    LoadedCheckpoint,
    load_manifest,
    read_checkpoint,
    read_manifest,
    verify_checkpoint,
)
from rallypoint.checkpointing.retention import OWN_FILES, Found, Pruned, Pruner, Retention
from rallypoint.checkpointing.storage import Storage

__all__ = ["CheckpointInfo", "CheckpointStore", "CommitVerdict", "Pruned", "Retention"]


@dataclass(frozen=True)
class CommitVerdict:
    """Answer to "may this writer put its manifest now?"."""

    allowed: bool
    reason: str = ""
    """Why not, in words."""


def no_failpoint(name: str) -> None:
    """The failpoint hook of whoever injects no faults."""


class CheckpointStore:
    """Checkpoints of one job below one URL. May be used from one thread at a time; any number of
    stores, in any number of processes, may share a URL."""

    def __init__(
        self,
        url: str,
        *,
        credentials_file: str | None = None,
        storage: Storage | None = None,
        new_attempt: Callable[[], str] = manifests.new_attempt,
    ) -> None:
        """Touches nothing. Raises `UnsupportedUrl` (a `ConfigError`) for a URL that cannot be used.
        ``storage`` replaces what the URL names."""
        self._storage = open_storage(url, credentials_file) if storage is None else storage
        self._new_attempt = new_attempt
        self._is_ours = False

    @property
    def url(self) -> str:
        """Where the checkpoints are."""
        return self._storage.root

    def save(
        self,
        tensors: Mapping[str, Tensor],
        scopes: Mapping[str, str],
        meta: CheckpointMeta,
        *,
        may_commit: Callable[[], CommitVerdict],
        hit: Callable[[str], None] = no_failpoint,
    ) -> CheckpointInfo:
        """Write and commit one checkpoint; when this returns it is durable and visible.

        ``tensors`` (CPU) must not change meanwhile; ``scopes`` has the scope of each. ``hit`` is
        called at the failpoints ``checkpoint_save`` (half the data written) and
        ``checkpoint_manifest`` (allowed, manifest not yet put). Raises `NonFiniteState`,
        `CommitRefused`, or `CheckpointError` for whatever else went wrong; then nothing is visible.
        """
        entries = _entries(tensors, scopes)
        # Beside everything else: hashing takes as long as writing to a disk.
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-hash") as hashing:
            checksum = hashing.submit(tensorfile.checksum, tensors)
            tensorfile.require_finite(tensors)
            self._require_own_root(meta.job)
            return self._save(tensors, entries, meta, checksum, may_commit, hit)

    def _save(
        self,
        tensors: Mapping[str, Tensor],
        entries: dict[str, EntryRecord],
        meta: CheckpointMeta,
        checksum: Future[str],
        may_commit: Callable[[], CommitVerdict],
        hit: Callable[[str], None],
    ) -> CheckpointInfo:
        """Under a name of its own, which is left or taken back as a whole. Raises as `save`."""
        attempt = self._new_attempt()
        directory = manifests.directory_name(meta.iteration, meta.generation, attempt)
        try:
            size_bytes = self._write(directory, tensors, hit)
            files = {STATE_FILE: FileRecord(size_bytes=size_bytes, checksum=checksum.result())}
            manifest = Manifest(
                **msgspec.structs.asdict(meta),
                schema=SCHEMA,
                attempt=attempt,
                entries=entries,
                files=files,
            )
            info = self._commit(directory, manifest, may_commit, hit)
        except FileExistsError as error:
            raise CheckpointError(
                f"{self.url}/{directory} belongs to another writer; nothing was overwritten"
            ) from error
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.url}/{directory} was removed while it was written: a later commit has "
                f"overtaken this writer ({error})"
            ) from error
        except CommitRefused:
            self._discard(directory)
            raise
        except OSError as error:
            self._discard(directory)
            raise CheckpointError(f"cannot write {self.url}/{directory}: {error}") from error
        self._is_ours = True
        return info

    def list(self) -> list[CheckpointInfo]:
        """Committed checkpoints, newest first by (generation, iteration); not verified."""
        return [found.info for found in self._scan() if found.committed]

    def describe(self, directory: str) -> CheckpointInfo | None:
        """The checkpoint in a directory of any name (a copy somebody renamed), None if there is no
        manifest. Raises `DamagedCheckpoint` for one that cannot be read."""
        try:
            self._storage.open(directory, MANIFEST_FILE).close()
        except OSError:
            return None
        path = f"{self.url}/{directory}"
        manifest = load_manifest(self._storage, directory, path)
        return CheckpointInfo(
            iteration=manifest.iteration,
            generation=manifest.generation,
            attempt=manifest.attempt,
            path=path,
            size_bytes=sum(record.size_bytes for record in manifest.files.values()),
        )

    def verify(self, info: CheckpointInfo) -> None:
        """Read everything back. Raises `DamagedCheckpoint` naming the file and what differs, or
        `CheckpointError` when it cannot be read."""
        verify_checkpoint(self._storage, info)

    def verify_or_discard(self, info: CheckpointInfo) -> None:
        """`verify` what this store has just committed; what is damaged is removed, as if never made."""
        try:
            self.verify(info)
        except DamagedCheckpoint:
            self._discard(info.directory)
            raise

    def manifest(self, info: CheckpointInfo) -> Manifest:
        """Its manifest. Raises as `verify`."""
        if manifests.parse_directory_name(info.directory) is None:  # a copy that somebody renamed
            return load_manifest(self._storage, info.directory, info.path)
        return read_manifest(self._storage, info)

    def copy(
        self,
        info: CheckpointInfo,
        target: "CheckpointStore",
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> CheckpointInfo:
        """Copy a checkpoint to another store (see `copying`). Raises as `copying.copy_checkpoint`, and
        `CheckpointError` when checkpoints of another job are there."""
        job = self.manifest(info).job
        # Looked at afresh: that store may have been told before which job is its own.
        CheckpointStore(target.url, storage=target._storage)._require_own_root(job)
        return copy_checkpoint(self._storage, target._storage, info, on_bytes)

    def load(self, info: CheckpointInfo) -> LoadedCheckpoint:
        """Read and verify it. Raises as `verify`."""
        return read_checkpoint(self._storage, info)

    def restore_newest(self) -> tuple[LoadedCheckpoint | None, tuple[str, ...]]:
        """The newest checkpoint that verifies, or None; and why each newer one does not."""
        return self.load_newest(self.list())

    def load_newest(
        self, infos: Iterable[CheckpointInfo]
    ) -> tuple[LoadedCheckpoint | None, tuple[str, ...]]:
        """The first of ``infos`` that verifies, or None; and why each one before it does not."""
        skipped: list[str] = []
        for info in infos:
            try:
                loaded = self.load(info)
            except CheckpointError as error:
                skipped.append(str(error))
                continue
            return replace(loaded, skipped=tuple(skipped)), tuple(skipped)
        return None, tuple(skipped)

    def prune(
        self,
        keep: int | Retention,
        *,
        verified: CheckpointInfo | None = None,
        job: str | None = None,
        dry_run: bool = False,
    ) -> Pruned:
        """Remove what the rules do not want, and what writers left behind (see `retention`); an int keeps
        the newest that many. ``verified`` has just been verified by the caller; ``job``: those of another
        one are let be. Without either all must be of one job, else `CheckpointError` is raised.
        ``dry_run`` removes nothing, and tells what would be."""
        retention = Retention(last=keep) if isinstance(keep, int) else keep
        pruner = Pruner(self._storage, self._scan(), retention, verified, job)
        if verified is None and job is None:
            pruner.require_one_job()
        doomed = pruner.doomed()
        return pruner.would_remove(doomed) if dry_run else pruner.remove(doomed)

    def _write(
        self, directory: str, tensors: Mapping[str, Tensor], hit: Callable[[str], None]
    ) -> int:
        """The data file, in a directory that is made for it; its size in bytes."""
        pieces = list(tensorfile.stream(tensors))

        def parts() -> Iterator[memoryview]:
            for index, piece in enumerate(pieces):
                if index == len(pieces) // 2:
                    hit("checkpoint_save")
                yield piece

        self._storage.claim(directory)
        self._storage.create(directory, STATE_FILE, parts())
        size_bytes = sum(piece.nbytes for piece in pieces)
        self._require_size(directory, size_bytes)
        return size_bytes

    def _commit(
        self,
        directory: str,
        manifest: Manifest,
        may_commit: Callable[[], CommitVerdict],
        hit: Callable[[str], None],
    ) -> CheckpointInfo:
        """The question, then the manifest."""
        data, path = manifests.encode(manifest), f"{self.url}/{directory}"
        verdict = may_commit()
        if not verdict.allowed:
            raise CommitRefused(f"{path}: commit refused: {verdict.reason}")
        hit("checkpoint_manifest")
        self._storage.create(directory, MANIFEST_FILE, (data,))
        return CheckpointInfo(
            iteration=manifest.iteration,
            generation=manifest.generation,
            attempt=manifest.attempt,
            path=path,
            size_bytes=manifest.files[STATE_FILE].size_bytes + len(data),
        )

    def _require_size(self, directory: str, size_bytes: int) -> None:
        """A put that was cut, or what somebody has removed since, gets no manifest."""
        with self._storage.open(directory, STATE_FILE) as file:
            found = file.seek(0, os.SEEK_END)
        if found != size_bytes:
            raise OSError(
                f"{STATE_FILE} has {found} bytes there, of {size_bytes} that were written"
            )

    def _discard(self, directory: str) -> None:
        """Our name, so our litter. What cannot be removed now is collected after a later commit."""
        with contextlib.suppress(OSError):
            self._storage.remove(directory, OWN_FILES)

    def _scan(self) -> Sequence[Found]:
        """Every directory that has a checkpoint's name, newest first."""
        try:
            listed = self._storage.list(lambda name: bool(manifests.parse_directory_name(name)))
        except OSError as error:
            raise CheckpointError(f"cannot list {self.url}: {error}") from error
        found = [
            Found(CheckpointInfo(*parsed, f"{self.url}/{name}", sum(files.values())), files)
            for name, files in listed.items()
            if (parsed := manifests.parse_directory_name(name))
        ]
        return sorted(found, key=lambda f: (f.info.order, f.info.attempt), reverse=True)

    def _require_own_root(self, job: str) -> None:
        """One URL, one job: else retention and restore would mix two of them up. Whoever comes later sees
        ours, so one look is enough."""
        if self._is_ours:
            return
        other = None
        for info in self.list():
            try:
                other = read_manifest(self._storage, info).job
            except CheckpointError:
                continue  # restore and verify speak of damage; here only the job counts
            if other == job:
                self._is_ours = True  # whatever somebody copied beside it
                return
        if other is not None:
            raise CheckpointError(
                f"{self.url} holds checkpoints of job {other!r}, not of {job!r}: "
                "give every job its own checkpoint.url"
            )


def _entries(tensors: Mapping[str, Tensor], scopes: Mapping[str, str]) -> dict[str, EntryRecord]:
    if tensors.keys() != scopes.keys():
        raise CheckpointError(
            f"tensors and scopes name different entries: {sorted(tensors.keys() ^ scopes.keys())}"
        )
    unknown = {name: scope for name, scope in scopes.items() if scope not in SCOPES}
    if unknown:
        raise CheckpointError(f"unknown scopes {unknown}; there are {', '.join(SCOPES)}")
    return {
        name: EntryRecord(
            scope=scopes[name],  # type: ignore[arg-type]  # checked above
            dtype=tensorfile.dtype_name(name, tensor),
            shape=tuple(tensor.shape),
            file=STATE_FILE,
        )
        for name, tensor in sorted(tensors.items())
    }
