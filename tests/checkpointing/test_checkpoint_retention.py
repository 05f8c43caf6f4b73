"""Which checkpoints stay: the last, the multiples, the best; and what removal never touches."""

import errno
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.checkpointing.errors import CheckpointError
from rallypoint.checkpointing.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    CheckpointInfo,
    directory_name,
    new_attempt,
)
from rallypoint.checkpointing.storage import LocalStorage, ReadableFile
from rallypoint.checkpointing.store import CheckpointStore, Retention
from tests.checkpointing.samples import allowed, commit_of_another_job, meta, newest, scopes, state
from tests.checkpointing.test_checkpoint_command import run


def commit(
    store: CheckpointStore, iteration: int, generation: int = 1, value: float | None = None
) -> CheckpointInfo:
    """Save a checkpoint whose figure ``return_mean`` is ``value``."""
    metrics = {} if value is None else {"return_mean": value}
    tensors = state(iteration)
    about = msgspec.structs.replace(meta(iteration, generation), metrics=metrics)
    return store.save(tensors, scopes(tensors), about, may_commit=allowed)


def iterations(infos: Iterable[CheckpointInfo]) -> list[int]:
    return sorted(info.iteration for info in infos)


def spoil(info: CheckpointInfo) -> None:
    path = Path(info.path, STATE_FILE)
    path.write_bytes(path.read_bytes()[:-1])


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Iterations 10 to 100, in steps of 10; the figure is best in the middle, and 60 has none."""
    store = CheckpointStore(str(tmp_path))
    for iteration in range(10, 101, 10):
        commit(store, iteration, value=None if iteration == 60 else -abs(iteration - 50))
    return store


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (Retention(last=2), [90, 100]),
        (Retention(last=1, every=30), [30, 60, 90, 100]),
        (Retention(last=1, best=2, metric="return_mean"), [40, 50, 100]),
        (
            Retention(last=1, best=2, metric="return_mean", least=True),
            [90, 100],
        ),  # of equals the newest
        (Retention(last=2, every=50, best=1, metric="return_mean"), [50, 90, 100]),
        (Retention(last=1, best=3, metric="no_such_figure"), [100]),
        (Retention(last=20), list(range(10, 101, 10))),
    ],
    ids=str,
)
def test_what_one_of_the_rules_wants_stays(
    store: CheckpointStore, keep: Retention, left: list[int]
) -> None:
    told = store.prune(keep, dry_run=True)
    assert len(store.list()) == 10, "a dry run removes nothing"
    done = store.prune(keep)
    assert iterations(store.list()) == left
    assert (done.removed, done.kept, done.failed) == (told.removed, told.kept, ())
    assert len(done.kept) == len(left)
    assert store.prune(keep).removed == (), "the rules agree with themselves"


def test_of_a_redone_iteration_the_later_lineage_is_kept(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    for generation, iteration in ((1, 100), (1, 150), (2, 100), (2, 160)):
        commit(store, iteration, generation)
    store.prune(Retention(last=1, every=100))
    assert [(i.generation, i.iteration) for i in store.list()] == [(2, 160), (2, 100)]


def test_a_damaged_one_is_no_best_and_no_multiple(store: CheckpointStore) -> None:
    for info in store.list():
        if info.iteration in (50, 60):
            spoil(info)
    store.prune(Retention(last=1, every=30, best=1, metric="return_mean"))
    assert iterations(store.list()) == [30, 40, 90, 100]


def test_the_last_that_verifies_is_never_removed(store: CheckpointStore) -> None:
    for info in store.list():
        if info.iteration > 20:
            spoil(info)
    store.prune(Retention(last=1))
    assert newest(store).info.iteration == 20
    spoil(newest(store).info)
    spoil(store.list()[-1])
    before = store.list()
    assert store.prune(Retention(last=1)).removed == ()
    assert store.list() == before, "where nothing verifies, nothing is removed"


class Unreadable(LocalStorage):
    """A store that cannot read some manifests for now."""

    refuses: Callable[[str], bool] = staticmethod(lambda directory: False)

    def open(self, directory: str, name: str) -> ReadableFile:
        if name == MANIFEST_FILE and self.refuses(directory):
            raise OSError(errno.EIO, "Input/output error")
        return super().open(directory, name)


def test_what_cannot_be_read_now_is_not_judged(store: CheckpointStore, tmp_path: Path) -> None:
    (best,) = (info for info in store.list() if info.iteration == 50)
    storage = Unreadable(tmp_path)
    storage.refuses = lambda directory: directory == best.directory
    keep = Retention(last=1, every=25, best=1, metric="return_mean")
    CheckpointStore("unused", storage=storage).prune(keep)
    assert 50 in iterations(store.list())
    store.prune(keep)
    assert iterations(store.list()) == [50, 100]


def test_leftovers_go_after_a_later_commit_and_files_of_others_never(
    store: CheckpointStore, tmp_path: Path
) -> None:
    def leftover(iteration: int) -> Path:
        folder = tmp_path / directory_name(iteration, 1, new_attempt())
        folder.mkdir()
        (folder / f".{STATE_FILE}.{new_attempt()}.tmp").write_bytes(b"half")
        return folder

    old, new = leftover(95), leftover(105)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / STATE_FILE).write_text("mine")
    beside = Path(store.list()[-1].path, "README")
    beside.write_text("mine")
    store.prune(Retention(last=1))
    assert not old.exists()
    assert new.exists(), "its writer may live"
    assert beside.read_text() == "mine"
    assert (tmp_path / "notes" / STATE_FILE).read_text() == "mine"
    commit(store, 110)
    store.prune(Retention(last=1))
    assert not new.exists()
    assert [path.name for path in beside.parent.iterdir()] == ["README"]


@pytest.mark.parametrize("wrong", [{"last": 0}, {"every": 0}, {"best": -1}], ids=str)
def test_rules_that_cannot_be(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"retention: {name} = "):
        Retention(**wrong)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Kept:
    """What the rules mean, said a second time: over what is whole, newest first."""

    whole: Sequence[tuple[int, int, float | None]]

    def by(self, keep: Retention) -> set[tuple[int, int]]:
        wanted = {(g, i) for g, i, _ in self.whole[: keep.last]}
        if keep.every is not None:
            multiples: dict[int, tuple[int, int]] = {}
            for generation, iteration, _ in self.whole:
                if iteration % keep.every == 0:
                    multiples.setdefault(iteration, (generation, iteration))
            wanted |= set(multiples.values())
        rated = [(v if not keep.least else -v, g, i) for g, i, v in self.whole if v is not None]
        wanted |= {(g, i) for _, g, i in sorted(rated, reverse=True)[: keep.best]}
        return wanted


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    commits=st.lists(
        st.tuples(
            st.integers(1, 3), st.integers(0, 12), st.none() | st.integers(-3, 3), st.booleans()
        ),
        min_size=1,
        max_size=10,
        unique_by=lambda c: c[:2],
    ),
    last=st.integers(1, 3),
    every=st.none() | st.integers(1, 5),
    best=st.integers(0, 3),
    least=st.booleans(),
)
def test_any_rules_on_any_checkpoints(
    tmp_path_factory: pytest.TempPathFactory,
    commits: list[tuple[int, int, int | None, bool]],
    last: int,
    every: int | None,
    best: int,
    least: bool,
) -> None:
    store = CheckpointStore(str(tmp_path_factory.mktemp("any")))
    for generation, iteration, value, sound in commits:
        info = commit(store, iteration, generation, value)
        if not sound:
            spoil(info)
    whole = sorted(
        ((g, i, v) for g, i, v, sound in commits if sound), reverse=True, key=lambda c: c[:2]
    )
    keep = Retention(last=last, every=every, best=best, metric="return_mean", least=least)
    store.prune(keep)
    left = {info.order for info in store.list()}
    if not whole:
        assert len(left) == len(commits)
        return
    assert {order for order in left if order in {c[:2] for c in whole}} == Kept(whole).by(keep)
    assert newest(store).info.order == whole[0][:2]


def test_the_commands(
    store: CheckpointStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = ("--keep-last", "1", "--keep-every", "50")
    assert run("prune", str(tmp_path), *rules) == 0
    said = capsys.readouterr().out
    assert said.count("would remove") == 8
    assert "--yes does it" in said
    assert len(store.list()) == 10
    assert run("prune", str(tmp_path), *rules, "--yes", "--json") == 0
    done = msgspec.json.decode(capsys.readouterr().out)
    assert (len(done["removed"]), len(done["kept"]), done["dry_run"]) == (8, 2, False)
    assert iterations(store.list()) == [50, 100]
    for one in (store.list()[0].path, f"{store.list()[0].path}/", "."):
        monkeypatch.chdir(store.list()[0].path)
        with pytest.raises(CheckpointError, match="is one checkpoint: prune takes a directory"):
            run("prune", one, "--keep-last", "1", "--yes")
    assert iterations(store.list()) == [50, 100]
    with pytest.raises(CheckpointError, match="last = 0 must be at least 1"):
        run("prune", str(tmp_path), "--keep-last", "0")


@pytest.mark.parametrize(
    "rules",
    [{}, {"every": 99}, {"best": 1, "metric": "return_mean"}],
    ids=["last", "every", "best"],
)
def test_what_another_job_left_there_neither_counts_nor_goes(
    rules: dict[str, Any], tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    store = CheckpointStore(str(root))
    kept = commit(store, 99, value=1.0)
    commit(store, 100, value=0.5)
    verified = commit(store, 120, value=0.2)
    stranger = commit_of_another_job(root, tmp_path / "crawl")  # of iteration 99, figure 1.5
    with pytest.raises(CheckpointError, match=r"several jobs \(crawl, walk\): nothing is removed"):
        store.prune(1)
    pruned = store.prune(Retention(last=1, **rules), verified=verified, job="walk")
    assert len(pruned.removed) == (1 if rules else 2)
    wanted = {verified.path, stranger.path} | ({kept.path} if rules else set())
    assert {info.path for info in store.list()} == set(pruned.kept) == wanted
