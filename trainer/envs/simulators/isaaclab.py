"""The backend ``isaaclab``: tasks of Isaac Lab 3 under the elastic session.

Without Kit (Newton, MuJoCo-Warp) another count of envs is a new simulation in the same process. With
Isaac Sim that is not safe, so there the count of a process is fixed.
"""

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rallypoint.trainer.envs.base import Capabilities, EnvRequest, EnvSpec, StepResult
from rallypoint.trainer.envs.simulator import RebuiltEnv, Seeds
from rallypoint.trainer.envs.simulators.launching import StartUpWatch, launch_lock, lock_path
from rallypoint.trainer.envs.simulators.options import (
    Options,
    build_seed,
    choose_groups,
    joined,
    said_of_ends,
    set_path,
    sort_out,
)
from rallypoint.trainer.envs.simulators.terrain import OnTerrain, find_levels
from rallypoint.trainer.errors import EnvError

_SELECTORS: Final = ("physics", "renderer", "presets")
"""What Isaac Lab itself takes as ``key=value``: they choose among alternatives of the configuration."""


def isaaclab(request: EnvRequest) -> RebuiltEnv:
    """The backend. Raises `EnvError` when Isaac Lab is missing or does not know the task, and for
    overrides that fit nothing."""
    if importlib.util.find_spec("isaaclab") is None:
        raise EnvError(
            "env.backend = 'isaaclab': Isaac Lab is not installed; install rallypoint[isaaclab]"
        )
    return RebuiltEnv(_Launcher(request), request)


class _Launcher:
    """Builds simulations of one task; the first under the lock of the host, and watched."""

    def __init__(self, request: EnvRequest) -> None:
        self._request = request
        self._options = sort_out(request.overrides)
        self._launched = False

    def __call__(self, count: int) -> "IsaacLab":
        watch = StartUpWatch(self._options.launch_timeout_s, on_stage=self._request.on_stage)
        with contextlib.ExitStack() as stack:
            stack.enter_context(watch.watching())
            watch.stage("importing Isaac Lab")
            importlib.import_module("isaaclab_tasks")
            if not self._launched:
                self._lock(stack, watch)
            simulation = IsaacLab(self._request, self._options, count, watch)
            self._launched = True
        return simulation

    def _lock(self, stack: contextlib.ExitStack, watch: StartUpWatch) -> None:
        lock = launch_lock(
            lock_path("isaaclab"),
            owner=f"process {os.getpid()} ({self._request.task} on {self._request.device})",
            timeout_s=self._options.launch_timeout_s,
            on_wait=lambda owner: watch.stage(f"waiting for the launch of {owner}"),
        )
        stack.enter_context(lock)


class IsaacLab(OnTerrain):
    """One simulation; implements `rallypoint.trainer.envs.simulator.Simulator`."""

    def __init__(
        self, request: EnvRequest, options: Options, count: int, watch: StartUpWatch
    ) -> None:
        self._task = request.task
        with contextlib.ExitStack() as running:
            self._env = self._make(request, options, count, watch, running)
            self._levels = find_levels(self._env.scene.terrain)
            if self._levels is not None:
                running.callback(self._levels.release)
            watch.stage("starting the first episodes")
            observed, extras = self._env.reset()
            self._endings = sorted(extras.get("log", {}))
            self._spec = self._read_spec(request, options, observed)
            self._obs = joined(self._groups, observed)
            watch.stage("done")
            self._running = running.pop_all()  # until here, what fails ends the simulation

    def _make(
        self,
        request: EnvRequest,
        options: Options,
        count: int,
        watch: StartUpWatch,
        running: contextlib.ExitStack,
    ) -> Any:
        watch.stage("reading the configuration of the task")
        gymnasium = importlib.import_module("gymnasium")
        module, _, task = request.task.rpartition(":")
        if module:
            importlib.import_module(module)
        if task not in gymnasium.registry:
            known = sorted(name for name in gymnasium.registry if name.startswith("Isaac-"))
            raise EnvError(
                f"env.task = {request.task!r} is none of Isaac Lab's: {', '.join(known)}; one of your "
                "own is named with the module that registers it, as in 'my_tasks:My-Task'"
            )
        parsing = importlib.import_module("isaaclab_tasks.utils.parse_cfg")
        chosen = {k: v for k, v in options.settings.items() if k in _SELECTORS}
        cfg = parsing.parse_env_cfg(
            task,
            device=str(request.device),
            num_envs=count,
            overrides=[f"{name}={value}" for name, value in chosen.items()],
        )
        for path, value in options.settings.items():
            if path not in chosen:
                set_path(request.task, cfg, path, value)
        cfg.compute_final_obs = True
        cfg.seed = build_seed(request)
        watch.stage("launching the simulator")
        launch = importlib.import_module("isaaclab.app").launch_simulation
        running.enter_context(launch(cfg, {"device": str(request.device), "headless": True}))
        watch.stage("building the scene")
        env = gymnasium.make(task, cfg=cfg).unwrapped
        running.callback(env.close)
        _check_device(request, env)
        return env

    def _read_spec(self, request: EnvRequest, options: Options, observed: Any) -> EnvSpec:
        env = self._env
        self._groups = choose_groups(request.task, options.obs_groups, list(observed), "policy")
        with_kit = importlib.import_module("isaaclab.utils.version").has_kit()
        return EnvSpec(
            task=request.task,
            obs_dims={name: x.shape[1] for name, x in joined(self._groups, observed).items()},
            action_dim=int(np.prod(env.single_action_space.shape)),
            max_episode_steps=int(env.max_episode_length),
            step_dt_s=float(env.step_dt),
            capabilities=Capabilities(
                resize="restart" if with_kit else "rebuild",
                carry_state=False,
                final_obs=True,
                deterministic_split=False,
            ),
            device=torch.device(env.device),
        )

    @property
    def spec(self) -> EnvSpec:
        """What is fixed about the task."""
        return self._spec

    def reset(self, rows: NDArray[np.int64], seeds: NDArray[np.int64]) -> dict[str, Tensor]:
        """Begin episodes in these rows, each with a part of its time limit used up."""
        env = self._env
        env.seed(int(seeds[0]))
        where = torch.from_numpy(rows).to(env.device)
        every = rows.size == env.num_envs
        if self._levels is not None:
            self._levels.begin(rows, seeds)
        if every:
            observed, _ = env.reset()
        elif hasattr(env, "observation_manager"):
            observed, _ = env.reset(where.to(torch.int32))
        else:  # what DirectRLEnv.reset does, for some
            env._reset_idx(where.to(torch.int32))
            env.scene.write_data_to_sim()
            env.sim.forward()
            observed = env._compute_observations()
        spent = np.floor(seeds / 2**31 * self._spec.max_episode_steps).astype(np.int64)
        env.episode_length_buf[where] = torch.from_numpy(spent).to(env.episode_length_buf)
        for group, new in joined(self._groups, observed).items():
            self._obs[group] = new if every else self._obs[group].index_copy(0, where, new[where])
        return self._obs

    def set_progress(self, steps: int) -> None:
        """Curricula of the task go by it."""
        self._env.common_step_counter = steps

    def step(self, actions: Tensor, seeds: Seeds) -> StepResult:
        """One control step. What Isaac Lab hands out is its own memory: the caller copies."""
        observed, reward, terminated, truncated, extras = self._env.step(actions.to(torch.float32))
        if self._env.cfg.is_finite_horizon:
            terminated, truncated = terminated | truncated, torch.zeros_like(truncated)
        self._obs = joined(self._groups, observed)
        ended = terminated | truncated
        return StepResult(
            obs=self._obs,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            figures={} if self._levels is None else self._levels.stepped(ended),
            endings=said_of_ends(self._endings, extras.get("log", {}), ended),
            final_obs=self._final(extras, ended),
        )

    def _final(self, extras: Mapping[str, Any], ended: Tensor) -> dict[str, Tensor]:
        """Last observations, of episodes that this step ended; ``extras`` keeps those of earlier ones."""
        if "final_obs" not in extras:
            return self._obs
        final = joined(self._groups, extras["final_obs"])
        return {g: torch.where(ended[:, None], x, self._obs[g]) for g, x in final.items()}

    def close(self) -> None:
        """End the simulation."""
        self._obs = {}
        self._running.close()
        del self._env


def _check_device(request: EnvRequest, env: Any) -> None:
    """Isaac Lab picks a device of its own in some set-ups; two workers must not share one."""
    found = torch.device(env.device)
    if _identity(found) != _identity(request.device):
        raise EnvError(
            f"env.task = {request.task!r} runs on {found} ({_identity(found)}), not on the device of its "
            f"slot, {request.device} ({_identity(request.device)})"
        )


def _identity(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    return str(torch.cuda.get_device_properties(device).uuid)
