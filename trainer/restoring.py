"""What a worker begins with: the newest checkpoint that it can read, from whichever tier."""

import time
from collections.abc import Sequence
from typing import Final

import torch

from rallypoint.checkpointing import tiers
from rallypoint.checkpointing.reading import LoadedCheckpoint
from rallypoint.checkpointing.store import CheckpointStore
from rallypoint.daemon.shared import messages
from rallypoint.daemon.shared.config import Config
from rallypoint.trainer import fitting, warmstart
from rallypoint.trainer.elastic.rowsfile import RowsFiles
from rallypoint.trainer.elastic.session import ElasticSession
from rallypoint.trainer.errors import GroupBroken, TrainerError
from rallypoint.trainer.rollout import Rollout

ROWS: Final = "env_rows/"
"""What the names of env rows in a checkpoint begin with."""
ENV_IDS: Final = f"{ROWS}env_ids"


class Restorer:
    """Looks for checkpoints and loads them, for one worker."""

    def __init__(
        self,
        config: Config,
        stores: Sequence[CheckpointStore],
        session: ElasticSession[Rollout],
        rows: RowsFiles | None,
        patience_s: float,
    ) -> None:
        """``rows`` is where env rows are restored to, if that is asked for. While a store cannot be read
        but another one can, a restore is tried again for ``patience_s``."""
        self._config = config
        self._stores = stores
        self._session = session
        self._rows = rows
        self._patience_s = patience_s
        self._waits_since_s: float | None = None
        session.load_checkpoint = self._restore
        session.find_checkpoint = self._find
        session.load_warm_start = self._warm_start

    def newest_verified(self) -> tuple[int, int] | None:
        """(generation, iteration) of the newest checkpoint that verifies, as far as can be read now: what
        cannot be is said. Raises `CheckpointMismatch`, with what differs, when it does not fit this
        job: no worker begins then."""
        found = tiers.newest(self._stores, self._config.job.name)
        for problem in found.unreadable:
            self._session.link.send(
                messages.CheckpointFailed(
                    key=self._session.key, generation=0, iteration=0, error=problem
                )
            )
        return self._order(found.loaded)

    def _find(self) -> tuple[int, int] | None:
        """As `newest_verified`, before a restore, which is tried again while something cannot be read."""
        return self._order(self._newest_for_a_restore().loaded)

    def _order(self, loaded: LoadedCheckpoint | None) -> tuple[int, int] | None:
        if loaded is None:
            return None
        self._require_fit(loaded)
        return loaded.info.order

    def _newest_for_a_restore(self) -> tiers.Newest:
        """Raises `GroupBroken`, which forms anew, as long as a store cannot be read: it may hold the newest
        one. Without any that can be read for ever, else for our patience."""
        found = tiers.newest(self._stores, self._config.job.name)
        if not found.unreadable:
            self._waits_since_s = None
            return found
        now_s = time.monotonic()
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        if found.loaded is None or now_s - self._waits_since_s < self._patience_s:
            raise GroupBroken(f"cannot restore yet: {'; '.join(found.unreadable)}")
        return found

    def _restore(self, wanted: tuple[int, int], lineage: int) -> None:
        """Load the newest checkpoint that verifies into live state, and its env rows, where they are
        asked for, into the backup, from which whoever owns the envs takes them.

        Raises `TrainerError` when there is none, `CheckpointMismatch` with what differs when it belongs to
        other networks or another configuration, `GroupBroken` when it cannot be read now.
        """
        found = self._newest_for_a_restore()
        loaded = found.loaded
        if loaded is None:
            places = ", ".join(store.url for store in self._stores)
            raise TrainerError(
                f"checkpoint {wanted} at {places} was readable when this worker became ready, and is not "
                f"any more: {'; '.join(found.skipped) or 'nothing is there'}"
            )
        self._require_fit(loaded)
        live = self._session.state.registry.shared()
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(loaded.tensors[name])
        if self._rows is not None and ENV_IDS in loaded.tensors:
            at = self._session.in_lineage(lineage, loaded.info.iteration)
            rows = {n: t for n, t in loaded.tensors.items() if n.startswith(ROWS)}
            ids = rows.pop(ENV_IDS).numpy()
            named = {name.removeprefix(ROWS): tensor for name, tensor in rows.items()}
            self._rows.save(at.lineage, at.iteration, ids, named)
        self._session.link.send(
            messages.Restored(
                key=self._session.key,
                generation=loaded.info.generation,
                iteration=loaded.info.iteration,
                path=loaded.info.path,
                skipped=found.skipped,
            )
        )

    def _require_fit(self, loaded: LoadedCheckpoint) -> None:
        fitting.require_fit(
            loaded,
            self._session.state.registry.shared(),
            self._config,
            keys=fitting.agreed,
            names=lambda name: not name.startswith(ROWS),
            remedy="Set these keys back, or take only its parameters into a new job: --warm-start",
        )

    def _warm_start(self, url: str) -> None:
        """Parameters and statistics of this checkpoint into live state; said to the supervisor."""
        session = self._session

        def say(text: str) -> None:
            session.link.send(messages.Progress(key=session.key, stage=text))

        loaded = warmstart.load(url, self._config, session.state.registry.shared(), say)
        say(f"begins with the parameters and statistics of {loaded.info.path}")
