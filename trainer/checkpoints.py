"""The worker's commits: when, to which tier, and the question to the supervisor."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from rallypoint import __version__
from rallypoint.checkpointing.manifest import CheckpointMeta
from rallypoint.checkpointing.store import CheckpointStore, CommitVerdict, Retention
from rallypoint.checkpointing.writer import CheckpointWriter, SaveDone, SaveFailed, Snapshot
from rallypoint.daemon.shared import messages
from rallypoint.daemon.shared.config import CheckpointSection, Config
from rallypoint.daemon.shared.configload import RECORDED, config_hash
from rallypoint.daemon.shared.failpoints import Failpoints
from rallypoint.trainer.elastic.registry import Scope
from rallypoint.trainer.elastic.rowsfile import RowsFiles
from rallypoint.trainer.elastic.session import ElasticSession
from rallypoint.trainer.restoring import ENV_IDS, ROWS
from rallypoint.trainer.rollout import Rollout


class Tier:
    """One place for checkpoints, with its own period, retention and writer."""

    def __init__(
        self,
        name: messages.TierName,
        store: CheckpointStore,
        *,
        every_iterations: int,
        every_s: float | None,
        write: Callable[[messages.TierName, CheckpointStore], CheckpointWriter],
    ) -> None:
        self.store = store
        self.writer = write(name, store)
        self._every_iterations = every_iterations
        self._every_s = every_s
        self._last_s = time.monotonic()
        self.last_iteration = -1
        """The newest iteration that was handed over."""

    def is_due_by_count(self, iteration: int) -> bool:
        """Whether it is due after this iteration, as every rank can tell."""
        return iteration % self._every_iterations == 0

    def is_due(self, iteration: int) -> bool:
        """Whether one of the periods is over."""
        return self.is_due_by_count(iteration) or (
            self._every_s is not None and time.monotonic() - self._last_s >= self._every_s
        )

    def take(self, iteration: int) -> None:
        """Note that this iteration is handed over now."""
        self._last_s = time.monotonic()
        self.last_iteration = iteration

    def give_back(self) -> None:
        """What was handed over last did not become a checkpoint: it may be handed over again."""
        self.last_iteration = -1


class CheckpointKeeper:
    """Commits checkpoints of the session's committed state, from whichever rank is 0: each of the
    `tiers` by its own period, the first one also when the job holds, ends or restores."""

    def __init__(
        self,
        config: Config,
        directory: str,
        session: ElasticSession[Rollout],
        failpoints: Failpoints,
        answer_s: float,
        backup: RowsFiles | None,
    ) -> None:
        """``directory``: for checkpoints on the local disk; ``backup``: where env rows are read from, if
        that is asked for."""
        self._config = config
        self._session = session
        self._failpoints = failpoints
        self._answer_s = answer_s
        self._rows = backup if config.checkpoint.env_rows else None
        self._served = 0
        """How many of the supervisor's wishes for a checkpoint have been met."""
        self.tiers = self._make_tiers(config.checkpoint, directory)

    @property
    def _first(self) -> Tier:
        return self.tiers[0]

    def _make_tiers(self, section: CheckpointSection, directory: str) -> tuple[Tier, ...]:
        """``checkpoint.url``, or the directory in its place; then the directory beside it."""
        first = Tier(
            "url" if section.url else "local",
            CheckpointStore(section.url or directory, credentials_file=section.credentials_file),
            every_iterations=section.every_iterations,
            every_s=section.every_s,
            write=functools.partial(self._writer, _retention(section)),
        )
        if section.local_every_iterations is None:
            return (first,)
        second = Tier(
            "local",
            CheckpointStore(directory),
            every_iterations=section.local_every_iterations,
            every_s=None,
            write=functools.partial(self._writer, Retention(last=section.local_keep_last)),
        )
        return first, second

    def _writer(
        self, retention: Retention, tier: messages.TierName, store: CheckpointStore
    ) -> CheckpointWriter:
        session = self._session
        return CheckpointWriter(
            store,
            may_commit=self._may_commit,
            on_done=functools.partial(self._on_done, tier),
            on_failed=functools.partial(self._on_failed, tier),
            keep_last=retention,
            hit=lambda name: self._failpoints.hit(
                name, rank=session.rank, iteration=session.state.committed
            ),
        )

    def due_after(self, iteration: int) -> bool:
        """Whether every rank knows that rank 0 commits a checkpoint after this iteration."""
        return any(tier.is_due_by_count(iteration) for tier in self.tiers)

    def maybe_submit(self, metrics: Mapping[str, float]) -> None:
        """After a commit: hand the snapshot to the writer of each tier that is due."""
        for tier in self.tiers:
            if tier.is_due(self._session.state.committed):
                self._submit(tier, metrics)

    def submit_if_asked(self) -> None:
        """Between two steps of an iteration: hand over the newest committed state, where the supervisor
        wants that and it was not handed over before. Not before the generation is marked formed."""
        session, orders = self._session, self._session.link.orders
        asked = orders.commit_now
        if asked == self._served or session.generation == 0 or orders.formed != session.generation:
            return
        self._served = asked
        if session.rank == 0 and self._first.last_iteration != session.state.committed:
            self._submit(self._first, {})
            if (
                self._rows is not None
                and len({m.key.node for m in session.formed_plan.members}) > 1
            ):
                text = "a checkpoint at a notice has the env rows of rank 0's node alone"
                session.link.send(messages.Progress(key=session.key, stage=text))

    def _submit(self, tier: Tier, metrics: Mapping[str, float]) -> None:
        tier.take(self._session.state.committed)
        tier.writer.submit(*self._snapshot(metrics))

    def save_now(self) -> bool:
        """Commit the committed state under the present generation to the first tier, and wait for it.
        False when that failed (the supervisor has been told why)."""
        return self._save_now(self._first)

    def save_once(self) -> bool:
        """Have the committed state in a checkpoint: wait for the writer where it was handed over before,
        else `save_now`. What the first tier does not take goes to the next one. Whether it is there."""
        iteration, grace_s = self._session.state.committed, self._config.node.stop_grace_s
        for tier in self.tiers:
            if tier.last_iteration != iteration:
                self._save_now(tier)
            tier.writer.flush(grace_s)
            newest = self._session.checkpoint
            if newest is not None and newest[1] == iteration:
                return True
            tier.give_back()
        return False

    def _save_now(self, tier: Tier) -> bool:
        tier.take(self._session.state.committed)
        grace_s = self._config.node.stop_grace_s
        return isinstance(tier.writer.save_now(*self._snapshot({}), timeout_s=grace_s), SaveDone)

    def close(self) -> None:
        """Let what is in flight end, in bounded time."""
        for tier in self.tiers:
            tier.writer.close()

    def _snapshot(self, metrics: Mapping[str, float]) -> tuple[Snapshot, CheckpointMeta]:
        """The committed state, lent to a writer: the next commit goes into another copy."""
        began_s = time.perf_counter()
        session, registry = self._session, self._session.state.registry
        plan = session.formed_plan
        lent, release = session.state.copies.lend()
        tensors: dict[str, torch.Tensor] = lent.tensors()
        scopes: dict[str, str] = {name: registry.scope_of(name).value for name in tensors}
        rows = self._env_rows()
        tensors.update(rows)
        scopes.update(dict.fromkeys(rows, Scope.ENV_ROWS.value))
        sections: dict[str, Any] = msgspec.to_builtins(self._config)
        meta = CheckpointMeta(
            job=self._config.job.name,
            job_uid=session.link.orders.job_uid,
            iteration=session.state.committed,
            generation=plan.generation,
            env_steps=int(tensors["counters/env_steps"]),
            world_size=plan.world_size,
            budget=self._config.env.budget,
            config_hash=config_hash(self._config),
            config={name: sections[name] for name in RECORDED},
            versions={"rallypoint": __version__, "torch": str(torch.__version__)},
            metrics=dict(metrics),
            warm_start=plan.warm_start,
        )
        return Snapshot(tensors, scopes, release, time.perf_counter() - began_s), meta

    def _env_rows(self) -> dict[str, torch.Tensor]:
        """Rows of all envs at the committed safe point that this node has, where they are asked for."""
        if self._rows is None:
            return {}
        session = self._session
        at = session.safe_point(session.state.committed)
        every = np.arange(self._config.env.num_envs, dtype=np.int64)
        ids, rows = self._rows.find(at.lineage, at.iteration, every)
        if not ids.size:
            return {}  # no rollout has ended yet
        return {ENV_IDS: torch.from_numpy(ids)} | {f"{ROWS}{n}": t for n, t in rows.items()}

    def _may_commit(self, generation: int, iteration: int) -> CommitVerdict:
        answer = self._session.link.ask_commit(
            lambda number: messages.AskCommit(
                key=self._session.key, ask=number, generation=generation, iteration=iteration
            ),
            self._answer_s,
        )
        if answer is None:
            return CommitVerdict(False, f"the supervisor did not answer within {self._answer_s} s")
        return CommitVerdict(answer.allowed, answer.reason)

    def _on_done(self, tier: messages.TierName, done: SaveDone) -> None:
        info = done.info
        known = self._session.checkpoint
        self._session.checkpoint = info.order if known is None else max(known, info.order)
        self._session.link.send(
            messages.CheckpointDone(
                key=self._session.key,
                generation=info.generation,
                iteration=info.iteration,
                path=info.path,
                stall_s=done.stall_s,
                persist_s=done.persist_s,
                size_bytes=info.size_bytes,
                tier=tier,
                passed_over=done.passed_over,
            )
        )

    def _on_failed(self, tier: messages.TierName, failed: SaveFailed) -> None:
        self._session.link.send(
            messages.CheckpointFailed(
                key=self._session.key,
                generation=failed.generation,
                iteration=failed.iteration,
                error=str(failed.error),
                tier=tier,
            )
        )


def _retention(section: CheckpointSection) -> Retention:
    """What stays in the first tier."""
    return Retention(
        last=section.keep_last,
        every=section.keep_every,
        best=section.keep_best,
        metric=section.keep_best_metric,
        least=section.keep_best_order == "least",
    )
