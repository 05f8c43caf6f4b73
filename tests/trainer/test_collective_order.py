"""Real ranks over gloo: the order of collectives is the registry's, whatever their data."""

from pathlib import Path

import msgspec
import pytest

from rallypoint.daemon.shared.collectives import TABLE, of_job
from rallypoint.trainer.sizes import find_sizes
from tests.fakes.gloo import collectives_over_gloo, train_over_gloo
from tests.fakes.training import config

EPOCHS, MINI_BATCHES, ITERATIONS = 2, 2, 2


@pytest.mark.slow
def test_order_and_bytes_do_not_depend_on_data(tmp_path: Path) -> None:
    """One training with as many envs on each rank, one with other envs and a rank without any."""
    job = config(epochs=EPOCHS, mini_batches=MINI_BATCHES)
    trainings = (((0, 1), (2, 3)), ((4, 5, 6), ()))
    train_over_gloo(job, trainings, ITERATIONS, tmp_path)
    first, second = collectives_over_gloo(tmp_path, 2)
    assert first == second
    half = len(first) // 2
    assert first[:half] == first[half:]

    sizes = find_sizes(job)
    registry = {entry.name: entry for entry in TABLE}
    iteration = first[: half // ITERATIONS]
    assert first[:half] == iteration * ITERATIONS  # a constant number, in a constant order
    step = ["mini_batch", "gradients"]
    names = [name for name, _, _ in iteration]
    assert names == ["advantage_moments", *step * EPOCHS * MINI_BATCHES, "last"]
    dtypes = {"parameters": "float64"}
    for name, dtype, size in iteration:
        entry = registry[name]
        # The test's ranks have no session, so no header in the last collective.
        header = sizes.header_bytes if name == "last" else 0
        assert size == entry.size_bytes(sizes) - header, name
        expected = {"last": "float64"}.get(name, dtypes.get(entry.dtype, entry.dtype))
        assert dtype == f"torch.{expected}", name


@pytest.mark.slow
def test_ordered_sums_are_in_the_registry_too(tmp_path: Path) -> None:
    """Two blocks on each rank, so that K = 2."""
    job = config(epochs=EPOCHS, mini_batches=MINI_BATCHES, reduction="ordered")
    train_over_gloo(job, [((0, 3), (1, 2))], 1, tmp_path)
    first, second = collectives_over_gloo(tmp_path, 2)
    assert first == second
    sizes = msgspec.structs.replace(find_sizes(job), rank_blocks=2)
    step = ["mini_batch", "block_gradients"]
    names = [name for name, _, _ in first]
    begin = ["block_count", "blocks", "advantage_moments"]
    assert names == [*begin, *step * EPOCHS * MINI_BATCHES, "last"]
    registry = {entry.name: entry for entry in of_job(job)}
    for name, _, size in first:
        header = sizes.header_bytes if name == "last" else 0
        assert size == registry[name].size_bytes(sizes) - header, name
