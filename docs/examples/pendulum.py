"""A task of one's own: swing a pendulum up. N envs at once, on torch; try it with

rallypoint env check pendulum:make
rallypoint run --set env.backend=pendulum:make --set env.task=pendulum
"""

import numpy as np
import torch

from rallypoint.trainer.envs.base import Capabilities, EnvRequest, EnvSpec, StepResult
from rallypoint.trainer.envs.simulator import RebuiltEnv

CAN = Capabilities("rebuild", carry_state=False, final_obs=True, deterministic_split=True)


class Pendulum:
    def __init__(self, count, request):
        self.spec = EnvSpec(request.task, {"actor": 3}, 1, 200, 0.05, CAN, action_bound=1.0)
        self.angle, self.speed = torch.zeros(2, count, dtype=request.dtype)
        self.steps = torch.zeros(count)

    def observe(self):
        return {"actor": torch.stack([self.angle.cos(), self.angle.sin(), self.speed / 8], 1)}

    def reset(self, rows, seeds):  # begin an episode in these rows, each from its own seed
        draws = np.array([np.random.default_rng(s).uniform(-1, 1, 2) for s in seeds])
        self.angle[rows] = torch.from_numpy(np.pi * draws[:, 0]).to(self.angle)
        self.speed[rows] = torch.from_numpy(draws[:, 1]).to(self.angle)
        self.steps[rows] = 0
        return self.observe()

    def step(self, actions, seeds):
        torque = 2 * actions[:, 0].clamp(-1, 1)
        self.speed = (self.speed + 0.05 * (15 * self.angle.sin() + 3 * torque)).clamp(-8, 8)
        self.angle = torch.remainder(self.angle + 0.05 * self.speed + np.pi, 2 * np.pi) - np.pi
        self.steps += 1
        reward = 0.05 * (1 - self.angle**2 - 0.1 * self.speed**2 - 0.001 * torque**2)
        truncated, final = self.steps >= self.spec.max_episode_steps, self.observe()
        rows = truncated.nonzero()[:, 0].numpy()
        if rows.size:
            self.reset(rows, seeds(rows))
        return StepResult(
            self.observe(), reward, torch.zeros_like(truncated), truncated, final_obs=final
        )

    def close(self):  # nothing is held
        pass


def make(request: EnvRequest) -> RebuiltEnv:
    return RebuiltEnv(lambda count: Pendulum(count, request), request)
