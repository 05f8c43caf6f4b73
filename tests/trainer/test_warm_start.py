"""A warm start takes parameters and statistics and nothing else; what does not fit is told exactly."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rallypoint.checkpointing.errors import CheckpointError
from rallypoint.checkpointing.restore import load_checkpoint
from rallypoint.daemon.shared.config import Config
from rallypoint.trainer import fitting, warmstart
from rallypoint.trainer.elastic.collectives import SingleProcess
from rallypoint.trainer.errors import CheckpointMismatch
from tests.fakes.checkpoints import save
from tests.fakes.training import Worker, config, make_worker


def trained(settings: Config) -> Worker:
    """A worker after one iteration: every tensor of its state has moved."""
    worker, alone = make_worker(settings, [0]), SingleProcess()
    rollout = worker.collect(1)
    worker.update(rollout, alone, 1)
    worker.finish(rollout, alone)
    return worker


def load(directory: Path, worker: Worker, settings: Config) -> list[str]:
    said: list[str] = []
    warmstart.load(str(directory), settings, worker.live(), said.append)
    return said


def test_parameters_and_statistics_are_taken_and_the_rest_is_fresh(tmp_path: Path) -> None:
    source = trained(config())
    save(tmp_path, source, config())
    worker, untouched = make_worker(config(), [0]), make_worker(config(), [0])
    assert load(tmp_path, worker, config()) == []
    for name, tensor in worker.live().items():
        taken = name.startswith(("model/", "normaliser/"))
        expected = (source if taken else untouched).live()[name]
        assert torch.equal(tensor, expected), name
        if name.startswith(("model/", "optimiser/first", "normaliser/actor/count")):
            assert not torch.equal(source.live()[name], untouched.live()[name]), name


def test_a_policy_of_another_number_type_is_converted(tmp_path: Path) -> None:
    source = trained(config(dtype="float64"))
    save(tmp_path, source, config(dtype="float64"))
    worker = make_worker(config(dtype="float32"), [0])
    load(tmp_path, worker, config(dtype="float32"))
    for name, tensor in worker.live().items():
        if name.startswith("model/"):
            assert torch.equal(tensor, source.live()[name].float()), name


def test_other_shapes_are_refused_tensor_by_tensor(tmp_path: Path) -> None:
    save(tmp_path, trained(config()), config())
    other = config(hidden=(32, 16, 8))
    worker, untouched = make_worker(other, [0]), make_worker(other, [0])
    with pytest.raises(CheckpointMismatch) as refused:
        load(tmp_path, worker, other)
    text = str(refused.value)
    assert "model/actor.2.weight: [32, 32] in it, [16, 32] here" in text
    assert "model/actor.6.weight: nothing in it, [2, 8] here" in text
    assert "model/actor.0.weight" not in text, "that one fits"
    for name, tensor in worker.live().items():
        assert torch.equal(tensor, untouched.live()[name]), name


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("activation", "tanh", 'ppo.activation: "elu" in it, "tanh" here'),
        ("normaliser_clip", 3.0, "ppo.normaliser_clip: .* in it, 3.0 here"),
    ],
)
def test_the_same_shapes_that_make_another_function_are_refused(
    tmp_path: Path, key: str, value: object, said: str
) -> None:
    save(tmp_path, trained(config()), config())
    other = config(**{key: value})  # type: ignore[arg-type]
    with pytest.raises(CheckpointMismatch, match=said):
        load(tmp_path, make_worker(other, [0]), other)


def test_another_task_of_the_same_shapes_is_said(tmp_path: Path) -> None:
    save(tmp_path, trained(config()), config())
    elsewhere = replace(config(), env=replace(config().env, task="pointmass-2"))
    (said,) = load(tmp_path, make_worker(config(), [0]), elsewhere)
    assert "'pointmass'" in said
    assert "'pointmass-2'" in said


def test_nothing_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        load(tmp_path, make_worker(config(), [0]), config())


def require(directory: Path, worker: Worker, settings: Config) -> None:
    loaded = load_checkpoint(str(directory))
    own = {name for name in loaded.tensors if not name.startswith("progress/")}
    fitting.require_fit(
        loaded,
        worker.live(),
        settings,
        keys=fitting.agreed,
        names=own.__contains__,
        remedy="Mend it",
    )


def test_everything_is_restored_at_any_budget_but_not_with_other_values(tmp_path: Path) -> None:
    save(tmp_path, trained(config()), config())
    for budget in ("per_rank", "global"):
        section = replace(config().env, budget=budget, num_envs=64, block=16)
        require(tmp_path, make_worker(config(), [0]), replace(config(), env=section))
    other = config(gamma=0.5, lam=0.5)
    with pytest.raises(CheckpointMismatch) as refused:
        require(tmp_path, make_worker(other, [0]), other)
    assert str(refused.value).endswith(
        "does not fit this job (2 differences): ppo.gamma: 0.99 in it, 0.5 here; ppo.lam: 0.95 in it, "
        "0.5 here. Mend it"
    )


def test_another_number_type_is_no_restore(tmp_path: Path) -> None:
    save(tmp_path, trained(config()), config())
    other = config(dtype="float32")
    with pytest.raises(CheckpointMismatch, match=r"float64 \[32\] in it, float32 \[32\] here"):
        require(tmp_path, make_worker(other, [0]), other)
