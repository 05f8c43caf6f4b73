"""Our side of ``rallypoint bench ppo``: ``python -m rallypoint.ops.bench.ppo_ours DIR``.

The trainer of a worker, without a supervisor and without a process group: RSL-RL has none either.
"""

import sys
import time
from pathlib import Path

import torch

from rallypoint.daemon.shared.configload import from_json
from rallypoint.ops.bench import turns
from rallypoint.ops.bench.plain import make_assigned_env
from rallypoint.ops.bench.turns import Turn
from rallypoint.trainer.elastic.collectives import SingleProcess
from rallypoint.trainer.ppo import PpoLearner


class Ours:
    """Trains on; iterations are numbered through all turns."""

    def __init__(self, directory: Path) -> None:
        config = from_json((directory / "config.json").read_bytes())
        self._env = make_assigned_env(config, rank=0)
        self._learner = PpoLearner(config, self._env.spec, torch.device("cpu"))
        self._learner.on_assign(self._env.env_ids)
        self._collectives = SingleProcess()
        self._iteration = 0

    def play(self, iterations: int) -> Turn:
        """One turn."""
        env_steps, update_s = 0, 0.0
        begin_s = time.monotonic()
        for _ in range(iterations):
            self._iteration += 1
            rollout = self._learner.collect(self._env, self._iteration, on_step=lambda _: None)
            collected_s = time.monotonic()
            self._learner.update(
                rollout, self._collectives, self._learner.module, self._iteration, lambda: None
            )
            record = self._learner.pack(rollout)
            self._learner.merge(self._collectives.all_gather("last", record))
            if not self._learner.finite():
                raise RuntimeError(f"iteration {self._iteration}: parameters are not finite")
            update_s += time.monotonic() - collected_s
            env_steps += rollout.env_steps
        return Turn(env_steps, time.monotonic() - begin_s, update_s)


if __name__ == "__main__":
    torch.set_num_threads(1)
    turns.serve(lambda: Ours(Path(sys.argv[1])).play)
