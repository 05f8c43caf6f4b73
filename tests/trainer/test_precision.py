"""``[ppo] autocast`` and ``compile`` in a training on ranks."""

from typing import Any

import pytest

from tests.fakes.training import config, train

SHARDS = ((1, 3), (0,), (2,))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"autocast": "bfloat16"}, {"compile": "aot_eager"}], ids=["autocast", "compile"]
)
def test_other_precision_and_compiled_networks_train_on_ranks(options: dict[str, Any]) -> None:
    """State keeps its type, ranks agree on every bit, and figures stay near those of the plain run."""
    plain = train(config(dtype="float32", desired_kl=None), SHARDS, 2)[0]
    ranks = train(config(dtype="float32", desired_kl=None, **options), SHARDS, 2)
    for worker in ranks:
        assert worker.packed().hash() == ranks[0].packed().hash()
        assert worker.history[-1]["skipped_steps"] == 0
    live = ranks[0].live()
    assert {n: t.dtype for n, t in live.items()} == {n: t.dtype for n, t in plain.live().items()}
    for figure in ("reward_mean", "value_loss", "entropy"):
        expected = plain.history[0][figure]
        assert ranks[0].history[0][figure] == pytest.approx(expected, rel=0.05), figure
