"""Distillation: a student learns to act as a frozen teacher does, on the states that it reaches itself.

DAgger (Ross et al., "A reduction of imitation learning and structured prediction to no-regret online
learning", 2011): the teacher labels every state of the rollouts, and in a share of the envs, ``beta``,
it acts, too. The loss is the squared distance of the action means, summed over their dimensions, mean
over the samples of all ranks; PPO's own loss may be added.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rallypoint.checkpointing.restore import load_checkpoint
from rallypoint.daemon.shared.config import Config
from rallypoint.trainer.elastic.registry import Scope, StateRegistry
from rallypoint.trainer.envs.base import EnvSpec
from rallypoint.trainer.errors import StateMismatch, TrainerError
from rallypoint.trainer.evaluate import configuration, restore_learner
from rallypoint.trainer.figures import PPO_FIGURES
from rallypoint.trainer.ppo import PpoLearner
from rallypoint.trainer.rng import Purpose, uniform
from rallypoint.trainer.rollout import Advice


class DistillLearner(PpoLearner):
    """A student of the teacher in ``[distill] teacher``.

    The teacher is an entry of the state registry like any other: broadcast to newcomers, part of every
    hash and of every checkpoint, so that no two ranks can learn from different ones.
    """

    def __init__(self, config: Config, spec: EnvSpec, device: torch.device) -> None:
        """Reads the teacher. Raises `TrainerError` when it is of another task, `CheckpointError` when
        there is none."""
        super().__init__(config, spec, device)
        self._distill = config.distill
        self._teacher = _load_teacher(config, spec, device)

    def register(self, registry: StateRegistry) -> None:
        """As `PpoLearner.register`, and ``teacher``."""
        super().register(registry)
        registry.register("teacher", Scope.REPLICATED, self._teacher.frozen_tensors)

    def merge(self, records: Sequence[Tensor]) -> dict[str, float]:
        """As `PpoLearner.merge`; without PPO's loss its figures say nothing, and are left out."""
        merged = super().merge(records)
        if not self._distill.ppo_coef:
            merged = {name: value for name, value in merged.items() if name not in PPO_FIGURES}
        return merged

    def _advice(self, env_ids: NDArray[np.int64], iteration: int) -> Advice:
        share = self._distill.beta
        if self._distill.beta_iterations is not None:
            share *= max(0.0, 1.0 - (iteration - 1) / self._distill.beta_iterations)
        draws = uniform(self._seed, Purpose.TEACHER_ACTS, env_ids, iteration, 0, 1)[:, 0]
        return Advice(self._label, torch.from_numpy(draws < share).to(self._device))

    def _label(self, actor_obs: Tensor) -> Tensor:
        return self._teacher.mean_action({"actor": actor_obs}).to(self._dtype)


def _load_teacher(config: Config, spec: EnvSpec, device: torch.device) -> PpoLearner:
    """The policy of the newest checkpoint at ``[distill] teacher`` that verifies."""
    url = config.distill.teacher
    if url is None:
        raise TrainerError("a student needs distill.teacher")
    loaded = load_checkpoint(url, config.checkpoint.credentials_for(url))
    theirs = configuration(loaded)
    if theirs.env.task != config.env.task:
        raise TrainerError(
            f"distill.teacher = {url!r} was trained on the task {theirs.env.task!r}, but env.task = "
            f"{config.env.task!r}"
        )
    try:
        teacher = restore_learner(loaded, theirs, spec, device)
    except StateMismatch as error:
        raise TrainerError(f"distill.teacher = {url!r} does not fit this task: {error}") from error
    teacher.module.requires_grad_(False)
    return teacher
