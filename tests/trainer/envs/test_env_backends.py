"""What env.backend and env.overrides name."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

from rallypoint.daemon.shared.config import Config, EnvSection
from rallypoint.daemon.shared.envbackends import BACKENDS, ENTRY_POINTS
from rallypoint.daemon.shared.errors import RallypointError
from rallypoint.trainer.envs.backends import find_backend, parse_overrides
from rallypoint.trainer.envs.factory import embedded, expected_envs, make_env
from rallypoint.trainer.errors import EnvError
from tests.fakes import toy_simulator


def test_a_module_and_a_factory_are_a_backend() -> None:
    assert find_backend("tests.fakes.toy_simulator:make") is toy_simulator.make
    assert find_backend("embedded") is embedded


def test_the_configuration_gives_a_custom_env() -> None:
    section = EnvSection(backend="tests.fakes.toy_simulator:make", task="mine", num_envs=16)
    env = make_env(Config(env=section), dtype=torch.float64, num_envs=16)
    env.assign(np.arange(16), iteration=1)
    assert env.begin_rollout(1)["actor"].dtype == torch.float64
    assert env.builds == 1


def test_an_installed_distribution_offers_a_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "robots-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: robots\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[{ENTRY_POINTS}]\nrobots = tests.fakes.toy_simulator:make\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert find_backend("robots") is toy_simulator.make


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("isaacgym", "does not exist; choose one of .*embedded.*module:factory"),
        ("no_such_module:make", "No module named 'no_such_module'"),
        ("tests.fakes.toy_simulator:build", "has no attribute 'build'"),
        ("tests.fakes.toy_simulator:LIMIT", "LIMIT .* cannot be called"),
    ],
)
def test_one_that_does_not_exist_is_refused_in_words(name: str, words: str) -> None:
    with pytest.raises(RallypointError, match=words):
        find_backend(name)


def test_overrides_have_toml_values() -> None:
    given = ["frame_skip=5", "physics=newton", "a.b=[1, 2]", "text='x=y'"]
    expected = {"frame_skip": 5, "physics": "newton", "a.b": [1, 2], "text": "x=y"}
    assert parse_overrides(given) == expected
    with pytest.raises(EnvError, match=r"'frame_skip'.*name=value"):
        parse_overrides(["frame_skip"])


def test_the_embedded_backend_has_no_overrides() -> None:
    section = EnvSection(task="cartpole", overrides=("gravity=3",))
    with pytest.raises(EnvError, match="gravity"):
        make_env(Config(env=section), dtype=torch.float32)


def test_the_last_to_enter_expects_the_least_share() -> None:
    assert expected_envs(Config(env=EnvSection(num_envs=64))) == 64
    assert expected_envs(Config(env=EnvSection(num_envs=72, budget="global"))) == 32


def test_every_backend_of_this_project_is_named() -> None:
    assert all(place.startswith("rallypoint.trainer.envs.") for place in BACKENDS.values())
