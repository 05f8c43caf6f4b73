"""Policies of RSL-RL and SONIC: files of their layouts, written here by torch alone, and what comes of them."""

import argparse
import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rallypoint.checkpointing.restore import load_checkpoint
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.trainer import warmstart
from rallypoint.trainer.evaluate import configuration, evaluate, restore_learner
from rallypoint.trainer.policies.export import export
from rallypoint.trainer.policies.importing import COMMAND, ImportRefused
from tests.fakes.training import make_worker

OBS, ACTIONS, HIDDEN, SEEN = 6, 2, (16, 8), 1000
TASK = ("--task", "pointmass")


def mlp(outputs: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(OBS, HIDDEN[0]),
        nn.ELU(),
        nn.Linear(*HIDDEN),
        nn.ELU(),
        nn.Linear(HIDDEN[1], outputs),
    )


ACTOR, CRITIC = mlp(ACTIONS, 1), mlp(1, 2)
MEAN, VAR = torch.linspace(-1, 1, OBS), torch.linspace(0.5, 2, OBS)


def prefixed(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in module.state_dict().items()}


def empirical(prefix: str) -> dict[str, Tensor]:
    """As RSL-RL's running normalisation keeps it."""
    return {
        f"{prefix}_mean": MEAN[None],
        f"{prefix}_var": VAR[None],
        f"{prefix}_std": VAR.sqrt()[None],
        f"{prefix}count": torch.tensor(SEEN),
    }


def rsl_rl_5() -> dict[str, Any]:
    return {
        "actor_state_dict": {
            "distribution.std_param": torch.full((ACTIONS,), 0.7),
            **prefixed(ACTOR, "mlp."),
            **empirical("obs_normalizer."),
        },
        "critic_state_dict": {**prefixed(CRITIC, "mlp."), **empirical("obs_normalizer.")},
        "optimizer_state_dict": {"state": {}, "param_groups": []},
        "iter": 1500,
        "infos": None,
    }


def rsl_rl_3() -> dict[str, Any]:
    model = {
        "std": torch.full((ACTIONS,), 0.7),
        **prefixed(ACTOR, "actor."),
        **prefixed(CRITIC, "critic."),
        **empirical("actor_obs_normalizer."),
        **empirical("critic_obs_normalizer."),
    }
    return {"model_state_dict": model, "optimizer_state_dict": {}, "iter": 1500, "infos": None}


def rsl_rl_2() -> dict[str, Any]:
    model = {
        "log_std": torch.full((ACTIONS,), 0.7).log(),
        **prefixed(ACTOR, "actor."),
        **prefixed(CRITIC, "critic."),
    }
    statistics = {
        "obs_norm_state_dict": empirical(""),
        "privileged_obs_norm_state_dict": empirical(""),
    }
    return {"model_state_dict": model, **statistics, "iter": 1500}


def sonic() -> dict[str, Any]:
    statistics = {
        "running_mean_std.running_mean": MEAN,
        "running_mean_std.running_var": VAR,
        "running_mean_std.count": torch.tensor(float(SEEN)),
    }
    return {
        "policy_state_dict": {
            "std": torch.full((ACTIONS,), 0.7),
            **prefixed(ACTOR, "actor_module.module."),
            **statistics,
        },
        "value_state_dict": {**prefixed(CRITIC, "critic_module.module."), **statistics},
        "optimizer_state_dict": {},
    }


FILES: dict[str, Callable[[], dict[str, Any]]] = {
    "RSL-RL 5": rsl_rl_5,
    "RSL-RL 3": rsl_rl_3,
    "RSL-RL 2": rsl_rl_2,
    "SONIC": sonic,
}


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    return COMMAND.run(parser.parse_args(arguments))


def importing(content: object, folder: Path, *options: str) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(content, folder / "model_1500.pt")
    output = folder / "imported"
    assert run(str(folder / "model_1500.pt"), "--output", str(output), *TASK, *options) == 0
    return output


def expected_action(obs: Tensor, form: str) -> Tensor:
    scale = VAR.sqrt() + 1e-2 if form == "std" else (VAR + 1e-5).sqrt()
    scaled = (obs - MEAN) / scale
    action: Tensor = ACTOR(scaled if form == "std" else scaled.clamp(-5, 5))
    return action


@pytest.mark.parametrize("layout", FILES)
def test_the_policy_acts_as_where_it_comes_from(layout: str, tmp_path: Path) -> None:
    profile = "sonic" if layout == "SONIC" else "rsl_rl"
    output = importing(
        FILES[layout](), tmp_path, "--profile", profile, "--set", "ppo.activation=elu"
    )
    loaded = load_checkpoint(str(output))
    config = configuration(loaded)
    worker = make_worker(config, [0])
    learner = restore_learner(loaded, config, worker.env.spec)
    obs = 2 * torch.randn(50, OBS, generator=torch.Generator().manual_seed(3))
    form = config.ppo.normaliser_form
    clip = config.ppo.normaliser_clip
    assert (form, clip) == (("variance", 5.0) if layout == "SONIC" else ("std", None))
    torch.testing.assert_close(
        learner.mean_action({"actor": obs}),
        expected_action(obs, form).detach(),
        rtol=1e-5,
        atol=1e-5,
    )
    state = loaded.tensors
    assert torch.equal(state["model/critic.2.weight"], CRITIC.state_dict()["2.weight"])
    assert int(state["normaliser/actor/count"]) == SEEN
    torch.testing.assert_close(learner.module.std(), torch.full((ACTIONS,), 0.7))
    assert (
        loaded.info.iteration
        == int(state["counters/iteration"])
        == (0 if layout == "SONIC" else 1500)
    )


def test_what_comes_of_it_can_be_used(tmp_path: Path) -> None:
    output = importing(rsl_rl_5(), tmp_path)
    loaded = load_checkpoint(str(output))
    config = configuration(loaded)
    worker = make_worker(config, [0])
    warmstart.load(str(output), config, worker.live(), lambda text: None)
    assert torch.equal(worker.live()["model/actor.4.bias"], ACTOR.state_dict()["4.bias"])
    result = evaluate(restore_learner(loaded, config, worker.env.spec), worker.env, 4, steps=20)
    assert result.episodes == 4
    assert export(loaded, "torchscript", tmp_path / "p.pt").largest_difference < 1e-4


def test_everything_is_accounted_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = rsl_rl_5()
    del content["critic_state_dict"]
    importing(content, tmp_path, "--json", "--set", "ppo.normalise_critic=true")
    done = json.loads(capsys.readouterr().out)
    assert done["layout"] == "RSL-RL 5"
    assert done["mapped"]["model/actor.0.weight"] == "actor_state_dict/mlp.0.weight"
    assert done["mapped"]["normaliser/actor/m2"] == "actor_state_dict/obs_normalizer._var"
    assert done["settings"]["ppo.hidden"] == "[16, 8]"
    assert "model/critic.0.weight" in done["fresh"]
    assert set(done["left"]) == {
        "actor_state_dict/obs_normalizer._std", "optimizer_state_dict", "iter", "infos",
    }  # fmt: skip


def test_the_command_says_what_a_job_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    importing(rsl_rl_5(), tmp_path)
    said = capsys.readouterr()
    assert "actor_state_dict/mlp.0.weight" in said.out
    assert "--set 'ppo.hidden=[16, 8]'" in said.out
    assert "not taken: optimizer_state_dict" in said.err


class Hostile:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch hacked",)


def save_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"model_state_dict": Hostile()}))


def save_torch(path: Path) -> None:
    torch.save({**rsl_rl_5(), "args": Hostile()}, path)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pickle that runs a command": (save_pickle, "not a file of tensors, numbers and text alone"),
    "an object among tensors": (
        save_torch,
        r"unsupported GLOBAL posix\.system\)\. A file .* reduced by its owner",
    ),
    "nothing": (lambda path: path.write_bytes(b""), "not a file of tensors"),
    "noise": (lambda path: path.write_bytes(os.urandom(500)), "not a file of tensors"),
    "a list": (lambda path: torch.save([1], path), "holds a list, not a dictionary"),
    "another trainer": (
        lambda path: torch.save({"policy": {"w": torch.ones(1)}}, path),
        "no policy of RSL-RL 5, RSL-RL, SONIC was found. It holds policy; looked for actor_",
    ),
    "no file": (lambda path: None, r"model\.pt: cannot be read: No such file"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_policy_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, said = WRONG[kind]
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "model.pt")
    with pytest.raises(ImportRefused, match=said) as refused:
        run("model.pt", *TASK)
    assert "weights_only" not in str(refused.value), "how to load it all the same"
    assert "add_safe_globals" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] in ([], ["model.pt"])


def without(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    actor = {k: v for k, v in content["actor_state_dict"].items() if k != name}
    return {**content, "actor_state_dict": actor}


def test_what_does_not_fit_the_task_is_told_tensor_by_tensor(tmp_path: Path) -> None:
    with pytest.raises(ImportRefused) as refused:
        importing(rsl_rl_5(), tmp_path, "--task", "cartpole")
    said = str(refused.value)
    assert "actor_state_dict/mlp.0.weight: [16, 6] in the file, [16, 4] here" in said
    assert "actor_state_dict/obs_normalizer._mean: [6] in the file, [4] here" in said
    with pytest.raises(
        ImportRefused, match=r"model/actor\.2\.bias: nothing in the file, \[8\] here"
    ):
        importing(without(rsl_rl_5(), "mlp.2.bias"), tmp_path)
    assert not (tmp_path / "imported").exists()


def test_two_statistics_of_the_same_observations_must_agree(tmp_path: Path) -> None:
    content = rsl_rl_5()
    content["critic_state_dict"]["obs_normalizer._mean"] = MEAN[None] + 1
    with pytest.raises(ImportRefused, match="differ, but actor and critic"):
        importing(content, tmp_path)


def test_a_wrong_key_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ppo\.activtion"):
        importing(rsl_rl_5(), tmp_path, "--set", "ppo.activtion=elu")
