"""The worker's checkpoints: when to commit, the question to the supervisor, and restoring."""

import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
import torch

from rallypoint import __version__
from rallypoint.checkpointing.manifest import CheckpointMeta
from rallypoint.checkpointing.reading import LoadedCheckpoint
from rallypoint.checkpointing.store import CheckpointStore, CommitVerdict
from rallypoint.checkpointing.writer import CheckpointWriter, SaveDone, SaveFailed
from rallypoint.daemon.shared import messages
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.configload import RECORDED, config_hash
from rallypoint.daemon.shared.failpoints import Failpoints
from rallypoint.trainer import fitting, warmstart
from rallypoint.trainer.elastic.registry import Scope
from rallypoint.trainer.elastic.rowsfile import RowsFiles
from rallypoint.trainer.elastic.session import ElasticSession
from rallypoint.trainer.errors import TrainerError
from rallypoint.trainer.rollout import Rollout

_ROWS: Final = "env_rows/"
_ENV_IDS: Final = f"{_ROWS}env_ids"


class CheckpointKeeper:
    """Commits checkpoints of the session's committed state, from whichever rank is 0."""

    def __init__(
        self,
        config: Config,
        url: str,
        session: ElasticSession[Rollout],
        failpoints: Failpoints,
        answer_s: float,
        backup: RowsFiles | None,
    ) -> None:
        """``backup`` is where env rows are read from and restored to, if that is asked for."""
        self._config = config
        self._session = session
        self._answer_s = answer_s
        self._rows = backup if config.checkpoint.env_rows else None
        self._store = CheckpointStore(url)
        self._last_s = time.monotonic()
        self._last_iteration = -1
        self._served = 0
        """How many of the supervisor's wishes for a checkpoint have been met."""
        self._writer = CheckpointWriter(
            self._store,
            may_commit=self._may_commit,
            on_done=self._on_done,
            on_failed=self._on_failed,
            keep_last=config.checkpoint.keep_last,
            hit=lambda name: failpoints.hit(
                name, rank=session.rank, iteration=session.state.committed
            ),
        )
        session.load_checkpoint = self._restore
        session.find_checkpoint = self.newest_verified
        session.load_warm_start = self._warm_start

    def newest_verified(self) -> tuple[int, int] | None:
        """(generation, iteration) of the newest checkpoint that verifies. Raises `CheckpointMismatch`, with
        what differs, when it does not fit this job: no worker begins then."""
        loaded, _ = self._store.restore_newest()
        if loaded is None:
            return None
        self._require_fit(loaded)
        return loaded.info.order

    def due_after(self, iteration: int) -> bool:
        """Whether every rank knows that rank 0 commits a checkpoint after this iteration."""
        return iteration % self._config.checkpoint.every_iterations == 0

    def maybe_submit(self, metrics: Mapping[str, float]) -> None:
        """After a commit: hand the snapshot to the writer if one of the periods is over."""
        section, iteration = self._config.checkpoint, self._session.state.committed
        every_s = section.every_s
        due = self.due_after(iteration) or (
            every_s is not None and time.monotonic() - self._last_s >= every_s
        )
        if due:
            self._submit(metrics)

    def submit_if_asked(self) -> None:
        """Between two steps of an iteration: hand over the newest committed state, where the supervisor
        wants that and it was not handed over before. Not before the generation is marked formed."""
        session, orders = self._session, self._session.link.orders
        asked = orders.commit_now
        if asked == self._served or session.generation == 0 or orders.formed != session.generation:
            return
        self._served = asked
        if session.rank == 0 and self._last_iteration != session.state.committed:
            self._submit({})
            if (
                self._rows is not None
                and len({m.key.node for m in session.formed_plan.members}) > 1
            ):
                text = "a checkpoint at a notice has the env rows of rank 0's node alone"
                session.link.send(messages.Progress(key=session.key, stage=text))

    def _submit(self, metrics: Mapping[str, float]) -> None:
        self._last_s = time.monotonic()
        self._last_iteration = self._session.state.committed
        self._writer.submit(*self._snapshot(metrics))

    def save_now(self) -> bool:
        """Commit the committed state under the present generation, and wait for it. False when that
        failed (the supervisor has been told why)."""
        tensors, scopes, meta = self._snapshot({})
        self._last_iteration = meta.iteration
        result = self._writer.save_now(
            tensors, scopes, meta, timeout_s=self._config.node.stop_grace_s
        )
        return isinstance(result, SaveDone)

    def save_once(self) -> None:
        """`save_now`, unless this iteration was handed over before; then only wait for the writer."""
        if self._last_iteration != self._session.state.committed:
            self.save_now()
        self._writer.flush(self._config.node.stop_grace_s)

    def close(self) -> None:
        self._writer.close()

    def _snapshot(
        self, metrics: Mapping[str, float]
    ) -> tuple[dict[str, torch.Tensor], dict[str, str], CheckpointMeta]:
        session, registry = self._session, self._session.state.registry
        plan = session.formed_plan
        tensors = session.state.snapshot.tensors()
        scopes = {name: registry.scope_of(name).value for name in tensors}
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
        return tensors, scopes, meta

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
        return {_ENV_IDS: torch.from_numpy(ids)} | {f"{_ROWS}{n}": t for n, t in rows.items()}

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

    def _on_done(self, done: SaveDone) -> None:
        info = done.info
        self._session.checkpoint = info.order
        self._session.link.send(
            messages.CheckpointDone(
                key=self._session.key,
                generation=info.generation,
                iteration=info.iteration,
                path=info.path,
                stall_s=done.stall_s,
                persist_s=done.persist_s,
                size_bytes=info.size_bytes,
            )
        )

    def _on_failed(self, failed: SaveFailed) -> None:
        self._session.link.send(
            messages.CheckpointFailed(
                key=self._session.key,
                generation=failed.generation,
                iteration=failed.iteration,
                error=str(failed.error),
            )
        )

    def _restore(self, wanted: tuple[int, int], lineage: int) -> None:
        """Load the newest checkpoint that verifies into live state, and its env rows, where they are
        asked for, into the backup, from which whoever owns the envs takes them.

        Raises `TrainerError` when there is none, `CheckpointMismatch` with what differs when it belongs to
        other networks or another configuration.
        """
        loaded, skipped = self._store.restore_newest()
        if loaded is None:
            raise TrainerError(
                f"checkpoint {wanted} at {self._store.url} was readable when this worker became ready, "
                f"and is not any more: {'; '.join(skipped) or 'nothing is there'}"
            )
        self._require_fit(loaded)
        live = self._session.state.registry.shared()
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(loaded.tensors[name])
        if self._rows is not None and _ENV_IDS in loaded.tensors:
            at = self._session.in_lineage(lineage, loaded.info.iteration)
            rows = {n: t for n, t in loaded.tensors.items() if n.startswith(_ROWS)}
            ids = rows.pop(_ENV_IDS).numpy()
            named = {name.removeprefix(_ROWS): tensor for name, tensor in rows.items()}
            self._rows.save(at.lineage, at.iteration, ids, named)
        self._session.link.send(
            messages.Restored(
                key=self._session.key,
                generation=loaded.info.generation,
                iteration=loaded.info.iteration,
                path=loaded.info.path,
                skipped=skipped,
            )
        )

    def _require_fit(self, loaded: LoadedCheckpoint) -> None:
        fitting.require_fit(
            loaded,
            self._session.state.registry.shared(),
            self._config,
            keys=fitting.agreed,
            names=lambda name: not name.startswith(_ROWS),
            remedy="Set these keys back, or take only its parameters into a new job: --warm-start",
        )

    def _warm_start(self, url: str) -> None:
        """Parameters and statistics of this checkpoint into live state; said to the supervisor."""
        session = self._session

        def say(text: str) -> None:
            session.link.send(messages.Progress(key=session.key, stage=text))

        loaded = warmstart.load(url, self._config, session.state.registry.shared(), say)
        say(f"begins with the parameters and statistics of {loaded.info.path}")
