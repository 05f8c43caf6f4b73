"""Isaac Lab's modules, as far as the adapter uses them, with a task that has the traps of the real one:
one dictionary of extras for ever, final observations that stay in it, one reward tensor, generators
that are reseeded, one simulation per process; and with Kit a second one hangs.
"""

import contextlib
import importlib.machinery
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
import pytest
import torch
from torch import Tensor

TASK: Final = "Isaac-Stub"
ROUGH: Final = "Isaac-Stub-Rough"
"""The same on a terrain with levels, of which an env climbs one with every episode."""
LEVELS: Final = 5
LIMIT: Final = 20


@dataclass
class Scene:
    num_envs: int = 0


@dataclass
class Sim:
    device: str = "cpu"
    dt: float = 0.01


@dataclass
class Cfg:
    scene: Scene = field(default_factory=Scene)
    sim: Sim = field(default_factory=Sim)
    seed: int | None = None
    compute_final_obs: bool = False
    is_finite_horizon: bool = False
    presets: list[str] = field(default_factory=list)
    rough: bool = False


class Terrain:
    """Rows of rising difficulty; envs begin on the lowest two."""

    def __init__(self, num_envs: int) -> None:
        self.cfg = types.SimpleNamespace(terrain_generator=types.SimpleNamespace(curriculum=True))
        row, column = torch.meshgrid(torch.arange(LEVELS), torch.arange(3), indexing="ij")
        self.terrain_origins: Any = torch.stack([8.0 * row, 8.0 * column, 0.1 * row], dim=2)
        self.terrain_levels = torch.randint(0, 2, (num_envs,))
        self.terrain_types = torch.arange(num_envs) % 3
        self.env_origins = self.terrain_origins[self.terrain_levels, self.terrain_types]

    def update_env_origins(self, env_ids: Any, move_up: Tensor, move_down: Tensor) -> None:
        levels = self.terrain_levels[env_ids] + 1 * move_up - 1 * move_down
        again = torch.randint_like(levels, LEVELS)
        self.terrain_levels[env_ids] = torch.where(levels < LEVELS, levels.clamp_min(0), again)
        self.env_origins[env_ids] = self.terrain_origins[
            self.terrain_levels[env_ids], self.terrain_types[env_ids]
        ]


class Env:
    """A manager-based env: a point on a line that is pushed; outside of ±2 its episode is over."""

    running: ClassVar["Env | None"] = None
    observation_manager = None  # manager-based envs have one, and take ids to reset
    max_episode_length = LIMIT
    step_dt = 0.02
    single_action_space = types.SimpleNamespace(shape=(1,))

    def __init__(self, cfg: Cfg) -> None:
        if Env.running is not None:
            raise RuntimeError("Simulation context already exists. Cannot create a new one.")
        Env.running = self
        self.cfg, self.num_envs, self.device = cfg, cfg.scene.num_envs, cfg.sim.device
        self.seed(cfg.seed or 0)
        self.unwrapped = self
        self.scene = types.SimpleNamespace(terrain=Terrain(self.num_envs) if cfg.rough else None)
        self.masses = torch.rand(self.num_envs)  # drawn once, as tasks randomise what they simulate
        self.extras: dict[str, Any] = {}
        self.common_step_counter = 0
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self._reward = torch.zeros(self.num_envs)
        self._state = torch.zeros(self.num_envs, 2)
        self._obs = torch.zeros(self.num_envs, 2)

    @staticmethod
    def seed(seed: int) -> int:
        torch.manual_seed(seed)
        np.random.seed(seed)
        torch.backends.cudnn.benchmark = True
        return seed

    def reset(
        self, env_ids: Tensor | slice = slice(None), *, seed: int | None = None
    ) -> tuple[Any, Any]:
        if seed is not None:
            self.seed(seed)
        self._begin(env_ids)
        self.extras["log"] = {"Episode_Reward/position": torch.zeros(())}
        return self._observe(), self.extras

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        push = actions[:, 0].clamp(-1, 1) + 0.1 * torch.randn(self.num_envs)
        self._state[:, 1] += 0.3 * push
        self._state[:, 0] += 0.3 * self._state[:, 1]
        self.episode_length_buf += 1
        self.common_step_counter += 1
        self._reward[:] = 1 - self._state[:, 0].abs()
        terminated = self._state[:, 0].abs() > 2
        truncated = self.episode_length_buf >= LIMIT  # both may hold
        ended = (terminated | truncated).nonzero()[:, 0]
        if ended.numel():
            if self.cfg.compute_final_obs:
                self.extras["final_obs"] = {"policy": self._state.clone(), "extra": self._extra()}
            self.extras["log"] = {"Episode_Reward/position": self._reward[ended].mean()}
            self._begin(ended)
        return self._observe(), self._reward, terminated, truncated, self.extras

    def close(self) -> None:
        assert Env.running is self
        Env.running = None
        self._state = torch.zeros(0, 2)

    def _begin(self, rows: Any) -> None:
        if self.scene.terrain is not None:  # the curriculum, which looks at what was before
            up = torch.ones_like(self.episode_length_buf[rows], dtype=torch.bool)
            self.scene.terrain.update_env_origins(rows, up, ~up)
        self.episode_length_buf[rows] = 0
        self._state[rows] = torch.rand(self._state[rows].shape) - 0.5

    def _observe(self) -> dict[str, Any]:
        self._obs.copy_(self._state)
        return {"policy": self._obs, "extra": self._extra()}

    def _extra(self) -> dict[str, Tensor]:
        return {"steps": self.episode_length_buf.float(), "map": torch.zeros(self.num_envs, 2, 2)}


class Stub:
    """What the modules did."""

    def __init__(self, *, kit: bool) -> None:
        self.kit = kit
        self.launches = 0

    def parse_env_cfg(self, task: str, *, device: str, num_envs: int, overrides: list[str]) -> Cfg:
        return Cfg(Scene(num_envs), Sim(device), presets=overrides, rough=task == ROUGH)

    @contextlib.contextmanager
    def launch_simulation(self, cfg: Cfg, arguments: dict[str, Any]) -> Iterator[None]:
        assert arguments == {"device": cfg.sim.device, "headless": True}
        self.launches += 1
        assert not self.kit or self.launches == 1, "with Kit a second launch in a process hangs"
        yield

    def has_kit(self) -> bool:
        return self.kit and self.launches > 0


def install(monkeypatch: pytest.MonkeyPatch, *, kit: bool) -> Stub:
    """Put the stub in the place of Isaac Lab until the test ends."""
    stub = Stub(kit=kit)
    monkeypatch.setattr(Env, "running", None)
    modules: dict[str, dict[str, Any]] = {
        "isaaclab": {},
        "isaaclab.app": {"launch_simulation": stub.launch_simulation},
        "isaaclab.utils": {},
        "isaaclab.utils.version": {"has_kit": stub.has_kit},
        "isaaclab_tasks": {},
        "isaaclab_tasks.utils": {},
        "isaaclab_tasks.utils.parse_cfg": {"parse_env_cfg": stub.parse_env_cfg},
        "gymnasium": {"registry": {TASK: None, ROUGH: None}, "make": lambda task, cfg: Env(cfg)},
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        for attribute, value in contents.items():
            setattr(module, attribute, value)
        monkeypatch.setitem(__import__("sys").modules, name, module)
    return stub
