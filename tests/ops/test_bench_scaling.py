"""The scaling benchmark: its arithmetic, and a real small run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rallypoint.daemon import cli
from rallypoint.daemon.shared.collectives import TABLE, Sizes
from rallypoint.ops.bench import scaling
from rallypoint.ops.bench.scaling import Size

SIZES = Sizes(
    parameters_bytes=4000, state_bytes=9000, record_values=10, header_bytes=72, mini_batches=6
)
ABOUT = {"task": "pointmass", "iterations": 2}


def counters(calls: int, buckets: int = 2, **wrong: float) -> dict[tuple[str, str], float]:
    """Of two workers that ran everything ``calls`` times each, gradients in buckets."""
    found: dict[tuple[str, str], float] = {}
    for entry in TABLE:
        count = 2.0 * calls * (buckets if entry.name == "gradients" else 1)
        found["collective_seconds_count", entry.name] = count
        found["collective_seconds_sum", entry.name] = 0.5 * calls
        total = 2.0 * calls * entry.size_bytes(SIZES)
        found["collective_bytes_total", entry.name] = total + wrong.get(entry.name, 0.0)
    return found


def size(workers: int, rate: float) -> Size:
    return Size(workers, 16 * workers, rate, scaling.traffic_of(counters(3), SIZES, workers))


def test_bytes_are_a_call_of_one_rank_whatever_the_buckets() -> None:
    for one in scaling.traffic_of(counters(5), SIZES, workers=2):
        assert one.agrees
        assert one.measured_bytes == one.registry_bytes
        assert (one.calls, one.seconds) == (5.0, 0.25)


def test_a_difference_is_said() -> None:
    wrong = scaling.traffic_of(counters(5, last=8.0), SIZES, workers=2)
    assert [one.name for one in wrong if not one.agrees] == ["last"]
    found = scaling.document([replace(size(2, 100.0), traffic=wrong)], ABOUT)
    assert found["agrees"] is False
    assert "DIFFERS" in scaling.text(found)


def test_what_did_not_run_has_no_bytes() -> None:
    assert all(t.measured_bytes is None for t in scaling.traffic_of(counters(0), SIZES, 2))


def test_efficiency_is_per_worker_over_that_of_the_smallest() -> None:
    found = scaling.document([size(1, 100.0), size(2, 180.0), size(4, 240.0)], ABOUT)
    assert [one["efficiency"] for one in found["sizes"]] == [1.0, 0.9, 0.6]
    assert [one["speed_up"] for one in found["sizes"]] == [1.0, 1.8, 2.4]
    assert "0.60" in scaling.text(found)


def test_no_worker_at_all_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "scaling", "--workers", "0,2"])
    assert "argument --workers: '0,2': at least 1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_real_run_measures_what_the_registry_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "scaling.json"
    code = cli.main(
        [
            *("bench", "scaling", "--workers", "2,1", "--iterations", "2", "--task", "pointmass"),
            *("--set", "env.num_envs=16", "--output", str(output)),
        ]
    )
    assert code == 0
    found = json.loads(output.read_text())
    assert [one["workers"] for one in found["sizes"]] == [1, 2]
    assert found["sizes"][0]["efficiency"] == 1.0
    ran = {one["name"] for one in found["sizes"][1]["collectives"] if one["measured_bytes"]}
    sized = {one["name"] for one in found["sizes"][1]["collectives"] if one["registry_bytes"]}
    assert ran == sized - {"conclude"}
    assert sized >= {"gradients", "mini_batch", "last", "broadcast"}
    assert "efficiency" in capsys.readouterr().out
