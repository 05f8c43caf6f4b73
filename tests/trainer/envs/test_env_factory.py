"""Building the env that the configuration names."""

import pytest
import torch

from rallypoint.daemon.shared.config import Config, EnvSection
from rallypoint.daemon.shared.tasks import TASK_OVERRIDES
from rallypoint.trainer.envs.factory import EMBEDDED_TASKS, make_env
from rallypoint.trainer.errors import EnvError


def test_the_daemon_knows_the_same_tasks() -> None:
    assert set(EMBEDDED_TASKS) == set(TASK_OVERRIDES)


@pytest.mark.parametrize("task", list(EMBEDDED_TASKS))
def test_a_new_env_holds_nothing_and_was_built_once(task: str) -> None:
    env = make_env(Config(env=EnvSection(task=task)), dtype=torch.float32)
    assert env.spec.task == task
    assert env.env_ids.size == 0
    assert env.builds == 1


def test_an_unknown_task_is_refused_with_those_that_exist() -> None:
    with pytest.raises(EnvError) as refusal:
        make_env(Config(env=EnvSection(task="quadruped-dance")), dtype=torch.float32)
    assert "quadruped-dance" in str(refusal.value)
    for task in EMBEDDED_TASKS:
        assert task in str(refusal.value)
