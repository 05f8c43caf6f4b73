"""Commit, order, refusal, retention: what a store promises, on each kind of storage."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import safetensors.torch
import torch

from rallypoint.checkpointing.errors import (
    CheckpointError,
    CommitRefused,
    NonFiniteState,
)
from rallypoint.checkpointing.manifest import MANIFEST_FILE, STATE_FILE, CheckpointInfo
from rallypoint.checkpointing.storage import Storage
from rallypoint.checkpointing.store import CheckpointStore, CommitVerdict
from tests.checkpointing.samples import (
    FullDisk,
    ReadOnlyRemoval,
    allowed,
    assert_state,
    commit,
    meta,
    newest,
    scopes,
    state,
)

EVERY_DTYPE = {
    "f64": torch.tensor([math.pi, -0.0, 5e-324], dtype=torch.float64),
    "f32": torch.linspace(-1, 1, 7, dtype=torch.float32),
    "f16": torch.tensor([[0.5], [65504.0]], dtype=torch.float16),
    "bf16": torch.tensor([1.0, 3e38], dtype=torch.bfloat16),
    "i64": torch.tensor(-(2**63), dtype=torch.int64),
    "i32": torch.tensor([2**31 - 1], dtype=torch.int32),
    "i16": torch.tensor([-5], dtype=torch.int16),
    "i8": torch.tensor([[-128, 127]], dtype=torch.int8),
    "u8": torch.arange(5, dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "f64 0-d": torch.tensor(0.1, dtype=torch.float64),
    "empty": torch.empty(0, 3, dtype=torch.float64),
    "transposed": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
    "strided": torch.arange(10)[::3],
}


@pytest.fixture
def store(open_place: Callable[[], Storage]) -> CheckpointStore:
    """A store on each kind of storage."""
    return CheckpointStore("unused", storage=open_place())


def paths(store: CheckpointStore) -> list[tuple[int, int]]:
    return [info.order for info in store.list()]


def test_every_number_type_and_shape_comes_back_bit_for_bit(store: CheckpointStore) -> None:
    info = store.save(EVERY_DTYPE, scopes(EVERY_DTYPE), meta(7), may_commit=allowed)
    loaded = newest(store)
    assert loaded.info == info
    assert loaded.tensors.keys() == EVERY_DTYPE.keys()
    for name, tensor in EVERY_DTYPE.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert loaded.tensors[name].shape == tensor.shape
        assert torch.equal(loaded.tensors[name], tensor), name
    assert math.copysign(1, loaded.tensors["f64"][1].item()) == -1


def test_a_state_without_tensors_is_a_checkpoint_too(store: CheckpointStore) -> None:
    store.save({}, {}, meta(1), may_commit=allowed)
    assert newest(store).tensors == {}


def test_the_file_is_what_the_safetensors_library_reads_and_writes(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    info = store.save(EVERY_DTYPE, scopes(EVERY_DTYPE), meta(7), may_commit=allowed)
    ours = Path(info.path, STATE_FILE).read_bytes()
    theirs = safetensors.torch.load(ours)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in EVERY_DTYPE.items())
    contiguous = {name: tensor.contiguous() for name, tensor in EVERY_DTYPE.items()}
    assert len(safetensors.torch.save(contiguous)) == len(ours)


def test_the_manifest_says_what_was_saved_and_of_what(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    tensors = state(3)
    given = {"policy/weight": "replicated", "statistics/count": "global"}
    info = store.save(tensors, given, meta(120, 3), may_commit=allowed)
    assert Path(info.path).name == f"iteration-0000000120-generation-000003-{info.attempt}"
    text = Path(info.path, MANIFEST_FILE).read_bytes()
    written = msgspec.json.decode(text)
    assert written["schema"] == 1
    assert (written["iteration"], written["generation"], written["env_steps"]) == (120, 3, 12000)
    assert written["config"]["ppo"] == {"hidden": [32, 32]}
    assert written["entries"]["statistics/count"] == {
        "scope": "global",
        "dtype": "I64",
        "shape": [],
        "file": STATE_FILE,
    }
    size = Path(info.path, STATE_FILE).stat().st_size
    assert written["files"][STATE_FILE]["size_bytes"] == size
    assert info.size_bytes == size + len(text)
    assert sorted(path.name for path in Path(info.path).iterdir()) == [MANIFEST_FILE, STATE_FILE]


def test_a_figure_that_is_not_a_number_is_null_and_does_no_harm(store: CheckpointStore) -> None:
    given = msgspec.structs.replace(meta(1), metrics={"return_mean": math.nan, "loss": 0.5})
    store.save(state(), scopes(state()), given, may_commit=allowed)
    assert newest(store).manifest.metrics == {"return_mean": None, "loss": 0.5}


def test_a_later_generation_wins_whatever_its_iteration(store: CheckpointStore) -> None:
    for iteration, generation in ((9, 1), (100, 2), (20, 10), (15, 10)):
        commit(store, iteration, generation)
    assert paths(store) == [(10, 20), (10, 15), (2, 100), (1, 9)]
    assert_state(newest(store), 20)


def test_an_unused_place_holds_nothing(store: CheckpointStore) -> None:
    assert store.list() == []
    assert store.restore_newest() == (None, ())
    assert store.prune(3).removed == ()


def test_a_refused_commit_leaves_nothing_visible(store: CheckpointStore) -> None:
    commit(store, 1)
    with pytest.raises(CommitRefused, match="generation 1 is not the newest formed, 2"):
        store.save(
            state(2),
            scopes(state()),
            meta(2),
            may_commit=lambda: CommitVerdict(False, "generation 1 is not the newest formed, 2"),
        )
    assert paths(store) == [(1, 1)]
    assert_state(newest(store), 1)


def test_the_question_comes_after_the_data_and_before_the_manifest(tmp_path: Path) -> None:
    seen: list[tuple[str, list[str]]] = []

    def note(what: str) -> None:
        names = sorted(p.name for p in tmp_path.rglob("*") if p.is_file())
        seen.append((what, ["unfinished" if n.endswith(".tmp") else n for n in names]))

    def ask() -> CommitVerdict:
        note("ask")
        return CommitVerdict(True)

    store = CheckpointStore(str(tmp_path))
    store.save(state(), scopes(state()), meta(1), may_commit=ask, hit=note)
    assert seen == [
        ("checkpoint_save", ["unfinished"]),
        ("ask", [STATE_FILE]),
        ("checkpoint_manifest", [STATE_FILE]),
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_numeric_16_state_that_is_not_finite_is_never_saved(
    store: CheckpointStore, value: float, dtype: torch.dtype
) -> None:
    tensors = state() | {"optimiser/moment": torch.tensor([1.0, value, 2.0], dtype=dtype)}
    with pytest.raises(NonFiniteState, match="'optimiser/moment' is not finite"):
        store.save(tensors, scopes(tensors), meta(1), may_commit=allowed)
    assert store.list() == []


@pytest.mark.parametrize(
    ("tensors", "given", "message"),
    [
        ({"z": torch.tensor(1j)}, {"z": "replicated"}, "'z' is torch.complex64"),
        (state(), {"policy/weight": "replicated"}, r"\['statistics/count'\]"),
        ({"a": torch.tensor(1)}, {"a": "everywhere"}, "{'a': 'everywhere'}"),
    ],
)
def test_what_cannot_be_described_is_refused(
    store: CheckpointStore,
    tensors: dict[str, torch.Tensor],
    given: dict[str, str],
    message: str,
) -> None:
    with pytest.raises(CheckpointError, match=message):
        store.save(tensors, given, meta(1), may_commit=allowed)
    assert store.list() == []


def test_a_place_belongs_to_one_job(
    store: CheckpointStore, open_place: Callable[[], Storage]
) -> None:
    commit(store, 1)
    with pytest.raises(CheckpointError, match="holds checkpoints of job 'walk', not of 'run'"):
        CheckpointStore("unused", storage=open_place()).save(
            state(), scopes(state()), meta(5, 5, job="run"), may_commit=allowed
        )
    assert paths(store) == [(1, 1)]


def test_a_name_that_is_taken_is_not_overwritten(tmp_path: Path) -> None:
    def store() -> CheckpointStore:
        return CheckpointStore(str(tmp_path), new_attempt=lambda: "0" * 16)

    first = commit(store(), 4)
    with pytest.raises(CheckpointError, match="belongs to another writer"):
        store().save(state(99), scopes(state()), meta(4), may_commit=allowed)
    assert store().list() == [first]
    assert_state(newest(store()), 4)


def test_a_place_that_is_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot list .*/file: .*Not a directory"):
        commit(CheckpointStore(str(tmp_path / "file")), 1)
    with pytest.raises(CheckpointError, match="cannot "):
        commit(CheckpointStore(str(tmp_path / "file" / "below")), 1)


@pytest.mark.parametrize("file", [STATE_FILE, MANIFEST_FILE])
def test_a_full_disk_costs_only_that_commit(tmp_path: Path, file: str) -> None:
    disk = FullDisk(tmp_path, full=lambda name: False)
    store = CheckpointStore("unused", storage=disk)
    commit(store, 1)
    disk.full = lambda name: name == file
    with pytest.raises(
        CheckpointError, match=r"cannot write .*iteration-0000000002.*No space left"
    ):
        commit(store, 2)
    assert len(list(tmp_path.iterdir())) == 1, "a failed save must not keep the disk full"
    assert_state(newest(store), 1)
    disk.full = lambda name: False
    commit(store, 3)
    assert_state(newest(store), 3)


# --- retention ------------------------------------------------------------------------------


def test_retention_keeps_the_newest(store: CheckpointStore) -> None:
    infos = [commit(store, iteration) for iteration in range(1, 6)]
    pruned = store.prune(2)
    assert paths(store) == [(1, 5), (1, 4)]
    assert sorted(pruned.removed) == sorted(info.path for info in infos[:3])
    assert pruned.failed == ()


def damage(info: CheckpointInfo) -> None:
    path = Path(info.path, STATE_FILE)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_retention_never_removes_the_last_one_that_verifies(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    infos = [commit(store, iteration) for iteration in range(1, 6)]
    for info in infos[1:]:
        damage(info)
    store.prune(1)
    assert_state(newest(store), 1)
    damage(infos[0])
    before = store.list()
    assert store.prune(1).removed == ()
    assert store.list() == before, "with nothing that verifies, nothing is removed"


def test_one_of_another_size_does_not_count_among_those_kept(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    infos = [commit(store, iteration) for iteration in range(1, 5)]
    Path(infos[2].path, STATE_FILE).write_bytes(b"short")
    Path(infos[1].path, MANIFEST_FILE).write_bytes(b"{")
    store.prune(2)
    assert [info.iteration for info in store.list()] == [4, 3, 2, 1]
    commit(store, 5)
    store.prune(2)
    assert [info.iteration for info in store.list()] == [5, 4], "damaged ones go when they are old"


def test_leftovers_are_collected_once_a_later_commit_stands(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    older = tmp_path / f"iteration-0000000002-generation-000001-{'a' * 16}"
    newer = tmp_path / f"iteration-0000000009-generation-000001-{'b' * 16}"
    for folder in (older, newer):
        folder.mkdir()
        (folder / f".{STATE_FILE}.{'c' * 16}.tmp").write_bytes(b"half")
    empty = tmp_path / f"iteration-0000000001-generation-000001-{'d' * 16}"
    empty.mkdir()
    store.prune(1)
    assert older.exists(), "nothing is committed yet"
    commit(store, 3)
    assert sorted(store.prune(1).removed) == [str(empty), str(older)]
    assert not older.exists()
    assert newer.exists(), "its writer may still be at work"
    commit(store, 1, generation=2)
    store.prune(5)
    assert not newer.exists()


def test_retention_never_touches_what_it_does_not_own(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    first = Path(commit(store, 1).path)
    foreign = [
        first / "notes.txt",
        tmp_path / "model.pt",
        tmp_path / "iteration-1" / MANIFEST_FILE,
        tmp_path / "iteration-0000000001-generation-000001-best" / STATE_FILE,
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(first, elsewhere)
    link = tmp_path / f"iteration-0000000000-generation-000000-{'e' * 16}"
    link.symlink_to(elsewhere)
    commit(store, 2)
    assert len(store.prune(1).removed) == 1
    assert store.prune(1).removed == ()
    assert [path.read_text() for path in foreign] == ["mine"] * len(foreign)
    assert sorted(path.name for path in first.iterdir()) == ["notes.txt"]
    assert (elsewhere / MANIFEST_FILE).exists()
    assert link.is_symlink()


def test_a_removal_that_fails_is_reported_and_tried_again(tmp_path: Path) -> None:
    disk = ReadOnlyRemoval(tmp_path)
    store = CheckpointStore("unused", storage=disk)
    old = commit(store, 1)
    commit(store, 2)
    pruned = store.prune(1)
    assert pruned.removed == ()
    assert pruned.failed == (f"cannot remove {old.path}: [Errno 13] Permission denied",)
    assert_state(newest(store), 2)
    disk.refuses = False
    assert store.prune(1).removed == (old.path,)


def test_a_writer_that_was_overtaken_commits_nothing(tmp_path: Path) -> None:
    stale, fresh = CheckpointStore(str(tmp_path)), CheckpointStore(str(tmp_path))

    def stopped_between_question_and_manifest(point: str) -> None:
        if point == "checkpoint_manifest":
            commit(fresh, 3, generation=2)
            fresh.prune(1)

    with pytest.raises(CheckpointError, match="a later commit has overtaken this writer"):
        stale.save(
            state(9),
            scopes(state()),
            meta(9, 1),
            may_commit=allowed,
            hit=stopped_between_question_and_manifest,
        )
    assert [info.order for info in fresh.list()] == [(2, 3)]


def test_a_manifest_that_slipped_through_does_not_win(tmp_path: Path) -> None:
    stale, fresh = CheckpointStore(str(tmp_path)), CheckpointStore(str(tmp_path))

    def stopped_between_question_and_manifest(point: str) -> None:
        if point == "checkpoint_manifest":
            commit(fresh, 3, generation=2)

    stale.save(
        state(9),
        scopes(state()),
        meta(9, 1),
        may_commit=allowed,
        hit=stopped_between_question_and_manifest,
    )
    assert [info.order for info in fresh.list()] == [(2, 3), (1, 9)]
    assert_state(newest(fresh), 3)
