"""Which checkpoints stay, and the removal of the others.

The newest that verifies is never removed; if none does, nothing is. What cannot be read at the moment
is not judged: it stays until it can be. Only files that a checkpoint's writer made are ever removed.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rallypoint.checkpointing.errors import CheckpointError, DamagedCheckpoint
from rallypoint.checkpointing.manifest import MANIFEST_FILE, STATE_FILE, CheckpointInfo, Manifest
from rallypoint.checkpointing.reading import read_manifest, verify_checkpoint
from rallypoint.checkpointing.storage import Storage, own_files

OWN_FILES: Final = (MANIFEST_FILE, STATE_FILE)
"""What a save makes, in the order of removal: without a manifest nobody reads the rest."""


@dataclass(frozen=True)
class Retention:
    """What stays: everything that one of these rules wants."""

    last: int = 3
    """The newest this many."""
    every: int | None = None
    """Those of iterations that are multiples of this; the newest of each. None: no such rule."""
    best: int = 0
    """The best this many by `metric`."""
    metric: str = "episode_return_mean"
    """A figure in the manifests; one without it, or without a finite one, is no candidate."""
    least: bool = False
    """The least is the best."""

    def __post_init__(self) -> None:
        for name, value, low in (
            ("last", self.last, 1),
            ("every", self.every, 1),
            ("best", self.best, 0),
        ):
            if value is not None and value < low:
                raise ValueError(f"retention: {name} = {value} must be at least {low}")


@dataclass(frozen=True)
class Found:
    """A directory with a checkpoint's name."""

    info: CheckpointInfo
    files: Mapping[str, int]
    """Size in bytes of each file in it."""

    @property
    def committed(self) -> bool:
        return MANIFEST_FILE in self.files


@dataclass(frozen=True)
class Pruned:
    """What retention did."""

    removed: tuple[str, ...]
    """Paths of committed checkpoints and of leftovers."""
    failed: tuple[str, ...]
    """Removals that failed, each with why; the next prune tries again."""
    kept: tuple[str, ...] = ()
    """Paths of the committed checkpoints that stay."""


class Pruner:
    """One application of a rule to what a listing has found."""

    def __init__(
        self,
        storage: Storage,
        found: Sequence[Found],
        retention: Retention,
        verified: CheckpointInfo | None,
        job: str | None,
    ) -> None:
        """``found`` is newest first; ``verified`` has just been verified by the caller. ``job``: whose
        they are; None: all of them are one's."""
        self._job = job
        self._storage = storage
        self._committed = [f for f in found if f.committed]
        self._leftovers = [f for f in found if not f.committed]
        self._retention = retention
        self._verified = verified
        self._manifests: dict[str, Manifest | None] = {}

    def doomed(self) -> list[Found]:
        """What has to go: checkpoints that no rule wants, damaged ones older than the last that are
        kept, and what writers left behind that is older than the newest that verifies."""
        kept: list[Found] = []
        others: list[Found] = []
        for found in self._committed:
            if len(kept) == self._retention.last:
                others.append(found)
            elif not self._is_foreign(found) and (
                self._is_intact(found) if kept else self._is_verified(found)
            ):
                kept.append(found)
        if not kept:
            return []
        wanted = self._every(kept, others) | self._best()
        leftovers = [f for f in self._leftovers if f.info.order < kept[0].info.order]
        return [f for f in others if f.info.path not in wanted] + leftovers

    def require_one_job(self) -> None:
        """Raises `CheckpointError` where there are checkpoints of several jobs: nobody says whose are to
        be thinned out."""
        jobs = {
            manifest.job
            for found in self._committed
            if (manifest := self._readable_manifest(found)) is not None
        }
        if len(jobs) > 1:
            raise CheckpointError(
                f"{self._storage.root} holds checkpoints of several jobs ({', '.join(sorted(jobs))}): "
                "nothing is removed before those of all but one are moved away"
            )

    def _is_foreign(self, found: Found) -> bool:
        """Whether somebody copied it here from another job: it neither counts nor goes."""
        if self._job is None or not found.committed:
            return False
        manifest = self._readable_manifest(found)
        return manifest is not None and manifest.job != self._job

    def _readable_manifest(self, found: Found) -> Manifest | None:
        try:
            return self._manifest(found)
        except CheckpointError:
            return None

    def remove(self, doomed: Sequence[Found]) -> Pruned:
        """Remove them, and go on after a failure."""
        removed: list[str] = []
        failed: list[str] = []
        gone: list[str] = []
        for found, own in _ours(doomed):
            if self._is_foreign(found):  # looked at one by one: whoever is killed here got on
                continue
            gone.append(found.info.path)
            try:
                self._storage.remove(found.info.directory, own)
                removed.append(found.info.path)
            except OSError as error:
                failed.append(f"cannot remove {found.info.path}: {error}")
        return Pruned(tuple(removed), tuple(failed), self._others(gone))

    def would_remove(self, doomed: Sequence[Found]) -> Pruned:
        """What `remove` would do, if nothing failed."""
        paths = tuple(found.info.path for found, _ in _ours(doomed))
        return Pruned(paths, (), self._others(paths))

    def _others(self, gone: Collection[str]) -> tuple[str, ...]:
        return tuple(f.info.path for f in self._committed if f.info.path not in gone)

    def _every(self, kept: Collection[Found], others: Sequence[Found]) -> set[str]:
        """Paths that the rule of multiples wants."""
        every = self._retention.every
        if every is None:
            return set()
        have = {f.info.iteration for f in kept}
        wanted: set[str] = set()
        for found in others:
            iteration = found.info.iteration
            if iteration % every == 0 and iteration not in have and self._may_be_intact(found):
                have.add(iteration)
                wanted.add(found.info.path)
        return wanted

    def _best(self) -> set[str]:
        """Paths that the rule of the best wants, and those that cannot be judged now."""
        if not self._retention.best:
            return set()
        rated: list[tuple[float, tuple[int, int], str]] = []
        unknown: set[str] = set()
        for found in self._committed:
            try:
                manifest = self._manifest(found)
            except CheckpointError:
                unknown.add(found.info.path)
                continue
            value = None if manifest is None else manifest.metrics.get(self._retention.metric)
            if value is None or self._is_foreign(found):
                continue
            if self._has_its_files(found, manifest):
                sign = -1.0 if self._retention.least else 1.0
                rated.append((sign * value, found.info.order, found.info.path))
        rated.sort(reverse=True)  # of equals the newest
        return unknown | {path for *_, path in rated[: self._retention.best]}

    def _is_verified(self, found: Found) -> bool:
        if self._verified is not None and found.info.path == self._verified.path:
            return True
        try:
            verify_checkpoint(self._storage, found.info)
        except CheckpointError:
            return False
        return True

    def _is_intact(self, found: Found) -> bool:
        """All files have their sizes. What cannot be read does not count, and so an older one is kept
        for it."""
        try:
            return self._has_its_files(found, self._manifest(found))
        except CheckpointError:
            return False

    def _may_be_intact(self, found: Found) -> bool:
        if self._is_foreign(found):
            return False
        try:
            return self._has_its_files(found, self._manifest(found))
        except CheckpointError:
            return True  # not judged while it cannot be read

    def _has_its_files(self, found: Found, manifest: Manifest | None) -> bool:
        return manifest is not None and all(
            found.files.get(name) == record.size_bytes for name, record in manifest.files.items()
        )

    def _manifest(self, found: Found) -> Manifest | None:
        """None for a damaged one. Raises `CheckpointError` where it cannot be read."""
        path = found.info.path
        if path not in self._manifests:
            try:
                self._manifests[path] = read_manifest(self._storage, found.info)
            except DamagedCheckpoint:
                self._manifests[path] = None
        return self._manifests[path]


def _ours(doomed: Iterable[Found]) -> Iterator[tuple[Found, list[str]]]:
    """Each with the files that may be removed; without those that hold only somebody else's."""
    for found in doomed:
        own = own_files(found.files, OWN_FILES)
        if own or not found.files:
            yield found, own
