"""The update over real processes, gloo and DDP: W = 1, 2, 3, 4, with shares that are not even."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.fakes.gloo import LEARNING_RATES, train_over_gloo
from tests.fakes.training import Worker, config, train

pytestmark = [pytest.mark.slow]

ITERATIONS, EPOCHS, MINI_BATCHES = 10, 5, 4
STEPS = ITERATIONS * EPOCHS * MINI_BATCHES
SPREADS = {
    1: ((range(6),),),
    2: (((0, 1, 2, 5), (3, 4)), ((0, 1, 2, 3, 4, 5), ())),
    3: (((0, 2, 4), (1, 3), (5,)),),
    4: (((5,), (0, 3), (), (1, 2, 4)),),
}
"""Env blocks by rank, for each W."""


@pytest.fixture(scope="module")
def union() -> Worker:
    """One process with all envs."""
    return train(config(), [range(6)], ITERATIONS)[0]


def assert_equal(found: dict[str, Tensor], expected: Worker, atol: float) -> None:
    for name, tensor in expected.live().items():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=0, atol=atol)


@pytest.mark.parametrize("world_size", SPREADS)
def test_numeric_01_02_12_14_ranks_equal_one_process(
    world_size: int, union: Worker, tmp_path: Path
) -> None:
    """200 optimiser steps: parameters, both moments, statistics, and each learning rate to the bit."""
    assert len(set(union.learning_rates)) > 10, "the adaptive rule was not at work"
    for ranks in train_over_gloo(config(), SPREADS[world_size], ITERATIONS, tmp_path):
        assert len(ranks) == world_size
        for found in ranks:
            assert found[LEARNING_RATES].tolist() == union.learning_rates
            assert found["optimiser/steps"].eq(STEPS).all()
            assert_equal(found, union, 1e-10)
            assert all(torch.equal(tensor, ranks[0][name]) for name, tensor in found.items())


@pytest.mark.parametrize("world_size", [2, 4])
def test_numeric_01_float32_for_one_iteration(world_size: int, tmp_path: Path) -> None:
    settings = config(dtype="float32")
    alone = train(settings, [range(6)], 1)[0]
    for ranks in train_over_gloo(settings, SPREADS[world_size][:1], 1, tmp_path):
        for name, parameter in alone.learner.module.named_parameters():
            found = ranks[0][f"model/{name}"]
            torch.testing.assert_close(found, parameter.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("field", ["actions", "mean"])
def test_numeric_13_16_all_ranks_skip_what_is_not_finite_on_one(field: str, tmp_path: Path) -> None:
    """``actions`` spoils a loss, ``mean`` only a KL. The env is in one mini-batch of each epoch."""
    spread, poison = SPREADS[3], (1, field)
    (ranks,) = train_over_gloo(config(), spread, 2, tmp_path, poison=poison)
    for found in ranks:
        assert found["optimiser/steps"].eq(2 * EPOCHS * (MINI_BATCHES - 1)).all()
        assert all(tensor.isfinite().all() for tensor in found.values())
        assert all(torch.equal(tensor, ranks[0][name]) for name, tensor in found.items())
