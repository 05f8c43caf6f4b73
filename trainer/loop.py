"""The training loop of a worker: iterations in whatever generation it is, until it leaves."""

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from rallypoint.daemon.shared.config import Config
from rallypoint.trainer.checkpoints import CheckpointKeeper
from rallypoint.trainer.elastic.envrows import EnvRows, SafePoint
from rallypoint.trainer.elastic.forming import Formation
from rallypoint.trainer.elastic.session import ElasticSession
from rallypoint.trainer.elastic.state import CommitRecord
from rallypoint.trainer.envs.base import AdaptiveEnv, VecEnv
from rallypoint.trainer.errors import (
    EnvCapacityError,
    GroupBroken,
    Left,
    RolloutDropped,
    StateMismatch,
)
from rallypoint.trainer.ppo import PpoLearner
from rallypoint.trainer.regrow import Regrow
from rallypoint.trainer.rollout import Rollout, join

_PAUSES_S: Final = (0.5, 1.0, 2.0, 5.0)
"""Between attempts to commit a restored state, or the last one; the last pause repeats."""


def _pauses_s() -> Iterator[float]:
    return itertools.chain(_PAUSES_S, itertools.repeat(_PAUSES_S[-1]))


class TrainingLoop:
    """Collect, update, commit; again after every change of membership."""

    def __init__(
        self,
        config: Config,
        session: ElasticSession[Rollout],
        learner: PpoLearner,
        env: VecEnv,
        rows: EnvRows,
        checkpoints: CheckpointKeeper,
        regrow: Regrow | None,
    ) -> None:
        """``regrow`` may end this worker at a safe point; None: its simulator can be resized here."""
        self._config = config
        self._session = session
        self._learner = learner
        self._env = env
        self._rows = rows
        self._checkpoints = checkpoints
        self._regrow = regrow
        self._module: nn.Module = learner.module
        self._wrapped = 0  # generation that the module is wrapped for
        self._opened = 0  # generation whose entry duties are done
        self._fetched = 0  # generation for which env rows of other nodes have been fetched

    def run(self) -> None:
        """Train until this worker leaves; always ends with `Left` or an error of the program."""
        while True:
            formation = self._session.enter()
            try:
                self._step(formation)
            except (GroupBroken, StateMismatch, EnvCapacityError) as error:
                self._unwrap()
                self._session.broken(error)

    def _step(self, formation: Formation) -> None:
        """One thing at a time: entry duties, the end of the job, a hold, a rollout, or an update."""
        session = self._session
        if self._opened != formation.plan.generation:
            self._open(formation)
        if session.stop_agreed or self._reached_end(formation):
            self._conclude(formation)
        if formation.plan.hold:
            self._hold(formation)
            return
        if self._fetched != formation.plan.generation:
            self._fetch(formation)
        if session.hand.rollout is None or session.blocks():
            self._collect()
        else:
            self._iterate(formation, session.hand.rollout)

    def _open(self, formation: Formation) -> None:
        """Before the first iteration of a generation: a restoring one commits under its number."""
        plan = formation.plan
        self._unwrap()
        if plan.commit_first:
            self._gather(formation, self._session.state.committed)
        if plan.commit_first and formation.rank == 0:
            self._session.await_formed_mark()
            self._session.hit("first_commit")
            self._commit_first()
        self._opened = plan.generation

    def _commit_first(self) -> None:
        """Commit the restored state; nothing is trained before that. A store that refuses is asked again
        and again in this generation: another one would meet the same refusal."""
        for pause_s in _pauses_s():
            self._session.ledger.switch("checkpoint")
            self._session.set_phase("checkpoint")
            with self._session.presence.alive():
                if self._checkpoints.save_now():
                    return
            self._session.rest(pause_s)

    def _fetch(self, formation: Formation) -> None:
        """Have the rows of our envs on this node, before anything else of a generation of several."""
        session, env = self._session, self._config.env
        if len(_nodes(formation)) > 1:
            at = session.safe_point(session.state.committed)
            self._rows.fetch(session, session.blocks(), at, env.num_envs // env.block)
        self._fetched = formation.plan.generation

    def _gather(self, formation: Formation, iteration: int) -> None:
        """Have the rows of all envs after this iteration on the node of rank 0, where it is about to commit
        them with a checkpoint."""
        session, env = self._session, self._config.env
        if self._config.checkpoint.env_rows and len(_nodes(formation)) > 1:
            at = session.safe_point(iteration)
            every = env.num_envs // env.block
            self._rows.gather(session, at, every, keeps=formation.rank == 0)

    def _unwrap(self) -> None:
        self._session.group.unwrap(self._module)
        self._module = self._learner.module

    def _reached_end(self, formation: Formation) -> bool:
        """All members read the bounds in their plan: one that has others would wait in vain."""
        state = self._session.state
        return formation.plan.reached(state.committed, int(state.env_steps))

    def _conclude(self, formation: Formation) -> None:
        """The last thing all members do together: rank 0 commits a checkpoint, then all leave."""
        session = self._session
        session.ledger.switch("drain")
        session.set_phase("leaving")
        session.await_formed_mark()
        self._gather(formation, session.state.committed)
        if session.rank == 0:
            self._commit_last()
        session.hit("conclude")
        session.all_reduce_sum("conclude", torch.ones((), dtype=torch.int64))
        raise Left("finished" if self._reached_end(formation) else "stopped")

    def _commit_last(self) -> None:
        """Commit what the job leaves behind. Refused at a finish (no lease, a full disk), it is tried again
        for as long as a stop may take; at a stop whoever asked for it waits, and the job is to go on."""
        session, until_s = self._session, time.monotonic() + self._config.node.stop_grace_s
        for pause_s in _pauses_s():
            with session.presence.alive():
                saved = self._checkpoints.save_once()
            if saved or session.stop_agreed or time.monotonic() + pause_s > until_s:
                return
            try:
                session.rest(pause_s)
            except Left:  # told to stop meanwhile: the others wait to leave together
                return

    def _hold(self, formation: Formation) -> None:
        self._gather(formation, self._session.state.committed)
        if formation.rank == 0:
            self._session.await_formed_mark()
            with self._session.presence.alive():
                self._checkpoints.save_once()
        self._session.hold()

    def _collect(self) -> None:
        """The rollout of the next iteration, with the env blocks that are ours now; or, where one is in
        hand already, of those that others have lost since, with their rows of the same safe point."""
        session, iteration = self._session, self._session.state.committed + 1
        if session.hand.take_dropped():
            self._rows.forget()
        blocks, in_hand = session.blocks(), session.hand.rollout
        kept = None if in_hand is None else self._rows.set_aside()
        session.hand.begin(blocks, self._take(blocks, session.safe_point(iteration - 1)))
        reached = session.safe_point(iteration)
        session.ledger.switch("rollout")
        session.set_phase("rollout")
        envs, half = len(self._env.env_ids), self._config.ppo.rollout_steps // 2
        try:
            rollout = self._learner.collect(
                self._env,
                iteration,
                on_step=lambda t: self._on_env_step(envs, halfway=t == half),
            )
            if in_hand is not None and kept is not None:
                rollout = join(in_hand, rollout)
                self._rows.bring_back(kept, reached)
            self._rows.stand(reached)
            session.hand.complete(rollout)
        except RolloutDropped:
            session.hand.abandon()

    def _on_env_step(self, env_steps: int, *, halfway: bool) -> None:
        self._session.on_env_step(env_steps, halfway=halfway)
        self._checkpoints.submit_if_asked()

    def _on_optimiser_step(self) -> None:
        self._session.on_optimiser_step()
        self._checkpoints.submit_if_asked()

    def _take(self, blocks: tuple[int, ...], at: SafePoint) -> tuple[int, ...]:
        """Have these blocks as they are at this safe point. Those whose envs begin new episodes."""
        if not self._rows.owns(blocks, at):
            self._session.ledger.switch("recovery")
            self._session.set_phase("envs")
        began_s = time.monotonic()
        self._learner.set_up(self._env)
        presence, resize = self._session.presence, self._env.spec.capabilities.resize
        # To build a simulator takes as long as it takes, and is no hang.
        with contextlib.nullcontext() if resize == "exact" else presence.alive():
            cut = self._rows.hold(blocks, at)
        presence.built(self._env.builds)
        self._session.took_envs(time.monotonic() - began_s)
        return cut

    def _iterate(self, formation: Formation, rollout: Rollout) -> None:
        """Update on the rollout in hand, the last collective, the commit."""
        session = self._session
        generation = formation.plan.generation
        session.ledger.switch("update")
        if self._wrapped != generation:
            self._module = session.replicated(self._learner.module)
            self._wrapped = generation
        session.set_phase("update")
        session.state.dirty = True
        with session.group.guard("update"):
            self._learner.update(
                rollout,
                session,
                self._module,
                session.state.committed + 1,
                self._on_optimiser_step,
            )
        session.ledger.switch("statistics")
        if self._checkpoints.due_after(session.state.committed + 1):
            self._gather(formation, session.state.committed + 1)
        record = session.finish_iteration(
            self._learner.pack(rollout),
            self._merge,
            env_steps=rollout.env_steps,
            finite=self._learner.finite(),
        )
        self._after_commit(record, formation)

    def _merge(self, records: Sequence[Tensor]) -> dict[str, float]:
        """Statistics of the iteration, and what the env makes of them."""
        figures = self._learner.merge(records)
        if isinstance(self._env, AdaptiveEnv):
            self._env.advance(figures)
        return figures

    def _after_commit(self, record: CommitRecord, formation: Formation) -> None:
        session = self._session
        if record.ranks[0].key == session.key and not session.stop_agreed:
            session.ledger.switch("checkpoint")
            session.set_phase("checkpoint")
            self._checkpoints.maybe_submit(record.metrics)
        session.check_orders()
        if self._regrow is not None and session.generation == formation.plan.generation:
            self._regrow.at_safe_point(formation.plan, record.iteration)


def _nodes(formation: Formation) -> set[str]:
    return {member.key.node for member in formation.plan.members}
