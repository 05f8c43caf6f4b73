"""What ``env.overrides`` says to adapters."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from rallypoint.trainer.envs.simulators.options import (
    LAUNCH_TIMEOUT_S,
    choose_groups,
    joined,
    set_path,
    sort_out,
)
from rallypoint.trainer.errors import EnvError


@dataclass
class Physics:
    dt: float = 0.01
    size: tuple[int, ...] = (1, 2)


@dataclass
class Task:
    sim: Physics = field(default_factory=Physics)
    commands: dict[str, Physics] = field(default_factory=lambda: {"motion": Physics()})


def test_names_of_ours_are_told_from_paths_of_the_task() -> None:
    found = sort_out(
        {"launch_timeout_s": 5, "obs_groups.critic": ["policy", "extra"], "sim.dt": 0.02}
    )
    assert found.launch_timeout_s == 5.0
    assert found.obs_groups == {"critic": ("policy", "extra")}
    assert found.settings == {"sim.dt": 0.02}
    assert sort_out({}).launch_timeout_s == LAUNCH_TIMEOUT_S


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"launch_timeout_s": 0}, "above 0"),
        ({"launch_timeout_s": "soon"}, "'soon'"),
        ({"obs_groups.teacher": ["policy"]}, "obs_groups.teacher"),
        ({"obs_groups.actor": "policy"}, "names of observation groups"),
        ({"obs_groups.actor": []}, "names of observation groups"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(EnvError, match=words):
        sort_out(overrides)


def test_paths_lead_through_objects_and_mappings() -> None:
    cfg = Task()
    set_path("t", cfg, "sim.dt", 0.5)
    set_path("t", cfg, "commands.motion.size", [3, 4])
    assert cfg.sim.dt == 0.5
    assert cfg.commands["motion"].size == (3, 4)
    fresh = Physics()
    set_path("t", cfg, "commands.motion", fresh)
    assert cfg.commands["motion"] is fresh


@pytest.mark.parametrize("path", ["sim.dr", "sym.dt", "commands.motions.dt", "sim.dt.x"])
def test_a_path_that_leads_nowhere_is_refused_with_what_is_there(path: str) -> None:
    with pytest.raises(EnvError, match=rf"'{path}'.*of t has no '.*'.*it has"):
        set_path("t", Task(), path, 1)


def test_groups_are_chosen_and_joined() -> None:
    obs = {
        "policy": torch.arange(6.0).view(2, 3),
        "nested": {"a": torch.zeros(2, 2, 2), "b": torch.ones(2)},
        "critic": torch.full((2, 1), 7.0),
    }
    assert choose_groups("t", {}, ["policy"], "policy") == {"actor": ("policy",)}
    assert choose_groups("t", {}, list(obs), "policy")["critic"] == ("critic",)
    chosen = choose_groups("t", {"critic": ("policy", "nested")}, list(obs), "policy")
    found = joined(chosen, obs)
    assert found["actor"].tolist() == torch.arange(6.0).view(2, 3).tolist()
    assert found["critic"].tolist() == [[0, 1, 2, 0, 0, 0, 0, 1], [3, 4, 5, 0, 0, 0, 0, 1]]
    with pytest.raises(EnvError, match="no observation group x; it has policy"):
        choose_groups("t", {"actor": ("x",)}, ["policy"], "policy")
