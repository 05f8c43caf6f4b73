"""The backend ``mjlab``: its tasks (MuJoCo-Warp) under the elastic session."""

import contextlib
import importlib
import importlib.util
import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rallypoint.trainer.envs.base import Capabilities, EnvRequest, EnvSpec, StepResult
from rallypoint.trainer.envs.simulator import RebuiltEnv, Seeds
from rallypoint.trainer.envs.simulators.launching import StartUpWatch, launch_lock, lock_path
from rallypoint.trainer.envs.simulators.options import (
    build_seed,
    choose_groups,
    joined,
    said_of_ends,
    set_path,
    sort_out,
)
from rallypoint.trainer.envs.simulators.terrain import OnTerrain, find_levels
from rallypoint.trainer.errors import EnvError


def mjlab(request: EnvRequest) -> RebuiltEnv:
    """The backend. Raises `EnvError` when mjlab is missing or does not know the task, and for overrides
    that fit nothing."""
    if importlib.util.find_spec("mjlab") is None:
        raise EnvError("env.backend = 'mjlab': mjlab is not installed; install rallypoint[mjlab]")
    options = sort_out(request.overrides)
    with contextlib.ExitStack() as stack:
        watch = StartUpWatch(options.launch_timeout_s, on_stage=request.on_stage)
        stack.enter_context(watch.watching())
        watch.stage("importing mjlab")
        importlib.import_module("mjlab.tasks")
        lock = launch_lock(
            lock_path("mjlab"),
            owner=f"process {os.getpid()} ({request.task} on {request.device})",
            timeout_s=options.launch_timeout_s,
            on_wait=lambda owner: watch.stage(f"waiting for the launch of {owner}"),
        )
        stack.enter_context(lock)
        watch.stage("building the simulation")
        env = RebuiltEnv(lambda count: Mjlab(request, count), request)
        watch.stage("done")
    return env


class Mjlab(OnTerrain):
    """One simulation; implements `rallypoint.trainer.envs.simulator.Simulator`."""

    def __init__(self, request: EnvRequest, count: int) -> None:
        options = sort_out(request.overrides)
        registry = importlib.import_module("mjlab.tasks.registry")
        if request.task not in registry.list_tasks():
            raise EnvError(
                f"env.task = {request.task!r} is none of mjlab's: {', '.join(registry.list_tasks())}"
            )
        cfg = registry.load_env_cfg(request.task)
        for path, value in options.settings.items():
            set_path(request.task, cfg, path, value)
        cfg.scene.num_envs = count
        cfg.seed = build_seed(request)
        cfg.auto_reset = False  # so that the last observations of an episode are seen
        env_type = importlib.import_module("mjlab.envs").ManagerBasedRlEnv
        self._env: Any = env_type(cfg, device=str(request.device))
        self._levels = find_levels(self._env.scene.terrain)
        observed, extras = self._env.reset()
        self._endings = sorted(extras["log"])
        self._groups = choose_groups(request.task, options.obs_groups, list(observed), "actor")
        self._obs = joined(self._groups, observed)
        self._spec = EnvSpec(
            task=request.task,
            obs_dims={name: x.shape[1] for name, x in self._obs.items()},
            action_dim=int(np.prod(self._env.single_action_space.shape)),
            max_episode_steps=int(self._env.max_episode_length),
            step_dt_s=float(self._env.step_dt),
            capabilities=Capabilities(
                resize="rebuild",
                carry_state=False,
                final_obs=True,
                deterministic_split=False,
                # Several fit into a process, but a thread that builds one seeds the global generators
                # and loads Warp's kernels under the one that steps.
                multi_instance=False,
            ),
            device=torch.device(self._env.device),
        )

    @property
    def spec(self) -> EnvSpec:
        """What is fixed about the task."""
        return self._spec

    def reset(self, rows: NDArray[np.int64], seeds: NDArray[np.int64]) -> dict[str, Tensor]:
        """Begin episodes in these rows, each with a part of its time limit used up."""
        self._env.seed(int(seeds[0]))
        where = torch.from_numpy(rows).to(self._spec.device)
        if self._levels is not None:
            self._levels.begin(rows, seeds)
        self._begin(where)
        spent = np.floor(seeds / 2**31 * self._spec.max_episode_steps).astype(np.int64)
        steps = self._env.episode_length_buf
        steps[where] = torch.from_numpy(spent).to(steps)
        return self._obs

    def set_progress(self, steps: int) -> None:
        """Curricula of the task go by it."""
        self._env.common_step_counter = steps

    def step(self, actions: Tensor, seeds: Seeds) -> StepResult:
        """One control step; then episodes begin where some ended."""
        observed, reward, terminated, truncated, _ = self._env.step(actions.to(torch.float32))
        terminated, truncated, reward = terminated.clone(), truncated.clone(), reward.clone()
        final = self._obs = joined(self._groups, observed)
        ended = terminated | truncated
        rows = ended.nonzero()[:, 0]
        if rows.numel():
            self._begin(rows)
        endings = said_of_ends(self._endings, self._env.extras["log"], ended)
        if self._env.cfg.is_finite_horizon:
            terminated, truncated = terminated | truncated, torch.zeros_like(truncated)
        return StepResult(
            obs=self._obs,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            figures={} if self._levels is None else self._levels.stepped(ended),
            endings=endings,
            final_obs=final,
        )

    def close(self) -> None:
        """Drop the simulation."""
        if self._levels is not None:
            self._levels.release()
        self._env.close()
        self._obs = {}
        del self._env

    def _begin(self, rows: Tensor) -> None:
        """Episodes begin in these rows; the observations of others stay as they were."""
        observed, _ = self._env.reset(env_ids=rows)
        self._obs = {
            group: self._obs[group].index_copy(0, rows, new[rows])
            for group, new in joined(self._groups, observed).items()
        }
