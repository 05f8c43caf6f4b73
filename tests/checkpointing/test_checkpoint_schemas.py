"""A checkpoint of every schema version so far is restored: read, acted on, and gone on from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rallypoint.checkpointing.restore import find, load_checkpoint
from rallypoint.trainer.envs.factory import make_env
from rallypoint.trainer.evaluate import configuration, restore_learner
from rallypoint.trainer.ppo import DTYPES

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("schema_*"))


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.name)
def test_its_files_verify(fixture: Path) -> None:
    store, infos = find(str(fixture))
    assert len(infos) == 1
    store.verify(infos[0])
    assert f"schema_{load_checkpoint(str(fixture)).manifest.schema}" == fixture.name


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.name)
def test_its_policy_acts_as_it_did(fixture: Path) -> None:
    loaded = load_checkpoint(str(fixture))
    config = configuration(loaded)
    env = make_env(config, dtype=DTYPES[config.ppo.dtype])
    try:
        learner = restore_learner(loaded, config, env.spec)
    finally:
        env.close()
    expected: dict[str, Any] = json.loads((fixture / "expected.json").read_text())
    found = learner.mean_action({"actor": torch.tensor(expected["obs"])})
    torch.testing.assert_close(found, torch.tensor(expected["action"]), rtol=1e-4, atol=1e-5)
