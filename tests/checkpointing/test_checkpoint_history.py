"""Any history of commits, kills, removals and damage leaves the newest verified one restorable."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rallypoint.checkpointing.errors import CommitRefused
from rallypoint.checkpointing.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    CheckpointInfo,
    directory_name,
    new_attempt,
)
from rallypoint.checkpointing.store import CheckpointStore, CommitVerdict, Retention
from tests.checkpointing.samples import assert_state, commit, meta, scopes, state

RULES = st.builds(
    Retention,
    last=st.integers(1, 3),
    every=st.none() | st.integers(2, 4),
    best=st.integers(0, 2),
    metric=st.sampled_from(["return_mean", "none"]),
    least=st.booleans(),
)


class History(RuleBasedStateMachine):
    """Keeps a list of the checkpoints that are whole, and compares a restart with it."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.store = CheckpointStore(str(self.root))
        self.whole: list[CheckpointInfo] = []
        self.generation = 1
        self.iteration = 0

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def newest_whole(self) -> CheckpointInfo | None:
        return max(self.whole, key=lambda info: info.order, default=None)

    @rule()
    def commit(self) -> None:
        self.iteration += 1
        self.whole.append(commit(self.store, self.iteration, self.generation))

    @rule(keep=RULES)
    def commit_and_prune(self, keep: Retention) -> None:
        self.commit()
        self.store.prune(keep, verified=self.whole[-1])
        self.whole = [info for info in self.whole if Path(info.path).exists()]

    @rule(back=st.integers(0, 3))
    def change_membership(self, back: int) -> None:
        """A new generation, which may start from an older iteration."""
        self.generation += 1
        self.iteration = max(0, self.iteration - back)

    @rule(how_far=st.sampled_from(["claimed", "data begun", "data", "manifest begun"]))
    def killed_commit(self, how_far: str) -> None:
        folder = self.root / directory_name(self.iteration + 1, self.generation, new_attempt())
        folder.mkdir()
        if how_far == "data begun":
            (folder / f".{STATE_FILE}.{new_attempt()}.tmp").write_bytes(b"half")
        if how_far in ("data", "manifest begun"):
            (folder / STATE_FILE).write_bytes(b"all")
        if how_far == "manifest begun":
            (folder / f".{MANIFEST_FILE}.{new_attempt()}.tmp").write_bytes(b"{")

    @rule()
    def refused_commit(self) -> None:
        tensors = state(-1)
        with pytest.raises(CommitRefused):
            self.store.save(
                tensors,
                scopes(tensors),
                meta(self.iteration + 1, self.generation + 1),
                may_commit=lambda: CommitVerdict(False, "fenced off"),
            )

    @rule(keep=RULES, really=st.booleans())
    def prune(self, keep: Retention, really: bool) -> None:
        before = self.newest_whole()
        self.store.prune(keep, dry_run=not really)
        self.whole = [info for info in self.whole if Path(info.path).exists()]
        assert self.newest_whole() == before

    @precondition(lambda self: self.whole)
    @rule(
        data=st.data(),
        name=st.sampled_from([MANIFEST_FILE, STATE_FILE]),
        how=st.sampled_from(["flip", "cut", "remove"]),
    )
    def damage(self, data: st.DataObject, name: str, how: str) -> None:
        info = data.draw(st.sampled_from(self.whole))
        self.whole.remove(info)
        path = Path(info.path, name)
        content = path.read_bytes()
        at = data.draw(st.integers(0, len(content) - 1))
        if how == "remove":
            path.unlink()
        elif how == "cut":
            path.write_bytes(content[:at])
        else:
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])

    @invariant()
    def a_restart_gets_the_newest_whole_one(self) -> None:
        loaded, skipped = self.store.restore_newest()
        expected = self.newest_whole()
        if expected is None:
            assert loaded is None
            return
        assert loaded is not None
        assert loaded.info.path == expected.path
        assert_state(loaded, expected.iteration)
        assert loaded.skipped == skipped


TestHistory = pytest.mark.slow(History.TestCase)
TestHistory.settings = settings(max_examples=30, stateful_step_count=20)
