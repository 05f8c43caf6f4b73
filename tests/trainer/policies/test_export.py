"""Exported files compute what the policy does, know what they are, and are whole or not there."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from rallypoint.checkpointing.restore import load_checkpoint
from rallypoint.daemon.shared.config import AuxSection, Config
from rallypoint.trainer.envs.factory import EMBEDDED_TASKS
from rallypoint.trainer.evaluate import restore_learner
from rallypoint.trainer.policies.errors import ExportError, MissingExtra, OutputError
from rallypoint.trainer.policies.export import COMMAND, FORMATS, export
from tests.fakes.checkpoints import save
from tests.fakes.training import config
from tests.trainer.test_warm_start import trained

CASES: dict[str, Config] = {
    "everything": config(
        activation="elu", normalise_actor=True, normaliser_clip=2.0, dtype="float32"
    ),
    "raw observations": config(activation="silu", normalise_actor=False, dtype="float32"),
    "std, no clip": config(
        activation="tanh", normalise_actor=True, normaliser_form="std", normaliser_clip=None
    ),
    "relu, one layer": config(activation="relu", hidden=(8,), dtype="float32"),
    "bfloat16": config(autocast="bfloat16", dtype="float32"),
    "latent": replace(config(dtype="float32"), aux=AuxSection(latent=4)),
    "humanoid": config(task="humanoid-track", dtype="float32"),
}


def checkpoint(directory: Path, settings: Config) -> Path:
    """Of a policy whose actions reach over the bounds."""
    worker = trained(settings)
    actor = dict(worker.learner.module.actor.named_parameters())
    ends = [name for name in actor if name.startswith("action.")] or list(actor)
    with torch.no_grad():
        actor[ends[-2]].mul_(8)
    return save(directory, worker, settings, iteration=7)


def run_onnx(path: Path, obs: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(path)
    return torch.from_numpy(session.run(None, {"obs": obs.numpy()})[0])


def run_torchscript(path: Path, obs: torch.Tensor) -> torch.Tensor:
    with pytest.warns(DeprecationWarning, match=r"torch\.jit"):
        loaded = torch.jit.load(path)  # type: ignore[no-untyped-call]
    out: torch.Tensor = loaded(obs)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_a_file_computes_what_the_env_is_given(case: str, kind: str, tmp_path: Path) -> None:
    settings = CASES[case]
    loaded = load_checkpoint(str(checkpoint(tmp_path / case, settings)))
    path = tmp_path / "policy"
    done = export(loaded, kind, path)
    assert done.largest_difference < 1e-4
    exact = replace(settings, ppo=replace(settings.ppo, autocast=None))
    spec = trained(exact).env.spec
    learner = restore_learner(loaded, exact, spec)
    obs = 5 * torch.randn(300, spec.obs_dims["actor"], generator=torch.Generator().manual_seed(1))
    bound = spec.action_bound
    assert bound is not None
    expected = learner.mean_action({"actor": obs}).float().clamp(-bound, bound)
    found = (run_onnx if kind == "onnx" else run_torchscript)(path, obs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert expected.abs().max() == bound, "the bound is met"
    assert expected.abs().min() < bound, "and not by all"


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_says_what_it_is(kind: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, CASES["everything"])
    export(load_checkpoint(str(path)), kind, tmp_path / "policy")
    _, said = FORMATS[kind].runner((tmp_path / "policy").read_bytes())
    assert said.pop("rallypoint_version")
    assert said == {
        "task": "pointmass",
        "job": "walk",
        "iteration": "7",
        "generation": "1",
        "env_steps": "1",
        "config_hash": "0",
        "checkpoint": path.name,
        "input": "obs",
        "input_group": "actor",
        "input_size": "6",
        "output": "action",
        "output_size": "2",
        "action_names": '["x", "y"]',
        "action_bound": "1.0",
        "step_dt_s": "0.1",
    }


@pytest.mark.parametrize(("kind", "package"), [("onnx", "onnx"), ("onnx", "onnxruntime")])
def test_without_the_extra_the_message_names_it(
    kind: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path, CASES["everything"])
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"package {package}.*pip install 'rallypoint\[export"):
        export(load_checkpoint(str(path)), kind, tmp_path / "policy")
    assert not (tmp_path / "policy").exists()


def test_a_file_that_computes_something_else_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a runtime that has an operator wrong."""
    path = checkpoint(tmp_path, CASES["everything"])
    right: Any = FORMATS["onnx"].runner

    def wrong(data: bytes) -> Any:
        run, said = right(data)
        return (lambda obs: run(obs) + 0.01), said

    monkeypatch.setattr(FORMATS["onnx"], "runner", wrong)
    with pytest.raises(ExportError, match=r"differs from the policy by 0\.0\d+ in an action"):
        export(load_checkpoint(str(path)), "onnx", tmp_path / "policy")
    assert not (tmp_path / "policy").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint(tmp_path, CASES["everything"])
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    output = tmp_path / "deep" / "policy.onnx"
    assert COMMAND.run(parser.parse_args([str(path), "--output", str(output)])) == 0
    text = capsys.readouterr().out
    assert "pointmass, iteration 7 of job walk" in text
    assert "largest difference to the policy over 4096 random observations: " in text
    assert COMMAND.run(parser.parse_args([str(path), "--output", str(output), "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(output)
    assert list(output.parent.iterdir()) == [output]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, CASES["everything"])
    with pytest.raises(OutputError, match=r"manifest\.json/policy: cannot be written"):
        export(load_checkpoint(str(path)), "onnx", path / "manifest.json" / "policy")


@pytest.mark.parametrize("task", ["quadruped-velocity", "humanoid-track", "cartpole", "pointmass"])
def test_envs_clip_actions_where_their_spec_says(task: str) -> None:
    """Beyond the bound an action is the bound; within it is itself."""
    results = {}
    spec = None
    for factor in (1.0, 1.5, 0.9):
        env = EMBEDDED_TASKS[task](seed=1, dtype=torch.float64)
        spec = env.spec
        env.assign(np.arange(8), iteration=1)
        env.begin_rollout(1)
        assert spec.action_bound is not None
        actions = torch.full((8, spec.action_dim), factor * spec.action_bound, dtype=torch.float64)
        final = env.step(actions).final_obs
        assert final is not None
        results[factor] = final["actor"]
        env.close()
    assert torch.equal(results[1.0], results[1.5])
    assert not torch.equal(results[1.0], results[0.9])
    assert spec is not None
    assert len(spec.action_names) == spec.action_dim
