"""What a simulator says of episodes as they end, as figures of an iteration."""

from dataclasses import replace

import pytest
import torch

from rallypoint.daemon.shared.config import EnvSection
from rallypoint.trainer.elastic.collectives import SingleProcess
from tests.fakes import isaaclab_stub
from tests.fakes.training import config, make_worker


def test_the_log_is_averaged_over_the_episodes_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    isaaclab_stub.install(monkeypatch, kit=False)
    env = EnvSection(backend="isaaclab", task=isaaclab_stub.TASK, block=8)
    worker = make_worker(replace(config(rollout_steps=30), env=env), [0, 1])
    said: list[tuple[float, int]] = []
    step = isaaclab_stub.Env.step

    def listened(self: isaaclab_stub.Env, actions: torch.Tensor) -> object:
        answer = step(self, actions)
        ended = int((answer[2] | answer[3]).sum())
        said.append((float(answer[4]["log"]["Episode_Reward/position"]), ended))
        return answer

    monkeypatch.setattr(isaaclab_stub.Env, "step", listened)
    rollout = worker.collect(1)
    worker.finish(rollout, SingleProcess())
    episodes = sum(count for _, count in said)
    assert episodes == len(rollout.episode_returns) > 16
    assert any(count == 0 for _, count in said)  # steps after which the log is stale
    mean = sum(value * count for value, count in said) / episodes
    found = worker.history[0]["episode/Episode_Reward/position"]
    assert found == pytest.approx(mean, abs=1e-6)
    worker.env.close()
