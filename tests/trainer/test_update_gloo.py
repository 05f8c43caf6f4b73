"""The update over real processes, gloo and DDP."""

from pathlib import Path

import pytest
import torch

from tests.fakes.gloo import train_over_gloo
from tests.fakes.training import config, train

TRAININGS = (((0, 1, 2), (3,)), ((0, 1, 2, 3), ()))


@pytest.mark.slow
def test_numeric_01_02_uneven_and_empty_ranks_equal_one_process(tmp_path: Path) -> None:
    union = train(config(), [range(4)], 3)[0].live()
    for ranks in train_over_gloo(config(), TRAININGS, 3, tmp_path):
        for name, expected in union.items():
            torch.testing.assert_close(ranks[0][name], expected.detach(), rtol=0, atol=1e-10)
            assert torch.equal(ranks[1][name], ranks[0][name]), name
