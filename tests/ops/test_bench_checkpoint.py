"""The checkpoint benchmark: its arithmetic, and real small saves."""

import importlib.util
from pathlib import Path

import pytest

from rallypoint.checkpointing.store import CheckpointStore
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.ops.bench import checkpoint
from rallypoint.ops.bench.checkpoint import Row, parse_size


def row(method: str, stall_s: float, persist_s: float, place: str = "local") -> Row:
    return Row(place, method, stall_s, persist_s, 150, 50 * 10**6, 4.0)


def test_ours_is_held_against_an_iteration_and_a_raw_copy_of_the_same_place() -> None:
    rows = [
        row("raw copy", 0.5, 0.5),
        row("ours", 0.02, 0.55),
        row("raw copy", 2.0, 2.0, "S3 (moto)"),
        row("ours", 0.01, 3.0, "S3 (moto)"),
    ]
    found = checkpoint.document(rows, {"size": "50MB", "device": "cpu"})
    local, remote = found["goals"]
    assert local["stall_s_per_100_mb"] == pytest.approx(0.04)
    assert local["stall_of_iteration"] == pytest.approx(0.005)
    assert local["persist_of_raw_copy"] == pytest.approx(1.1)
    assert remote["persist_of_raw_copy"] == pytest.approx(1.5)
    text = checkpoint.text(found)
    assert (
        "local: stall 40.0 ms per 100 MB, 0.50 % of an iteration (goal 1 %: met); persisted in 1.10 times"
        in text
    )
    assert "persisted in 1.50 times a raw copy (goal 1.2: missed)" in text


@pytest.mark.parametrize(
    ("stall_s", "verdict"), [(0.004, "8.0 ms per 100 MB (goal 10 ms: met)"), (0.006, "missed")]
)
def test_on_a_gpu_the_stall_itself_is_the_goal(stall_s: float, verdict: str) -> None:
    rows = [row("raw copy", 0.5, 0.5), row("ours", stall_s, 0.55)]
    assert verdict in checkpoint.text(checkpoint.document(rows, {"device": "cuda"}))


@pytest.mark.parametrize(("text", "size"), [("100MB", 10**8), ("1GB", 10**9), ("7KB", 7000)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["100", "MB", "0MB", "-1MB", "1.5GB", "1TB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a number and KB, MB or GB"):
        parse_size(text)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_rows_are_told_as_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own, and of the local directory alone where there is no S3 server."""
    methods = ("raw copy", "ours")
    monkeypatch.setattr(checkpoint, "METHODS", methods)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    told: list[Row] = []
    rows = checkpoint.measure(tmp_path, 10**6, saves=1, device="cpu", url=None, on_row=told.append)
    assert told == rows
    assert [(row.place, row.method) for row in rows] == [("local", method) for method in methods]
    assert rows[0].iteration_s is None
    assert 0 < rows[1].stall_s < rows[1].persist_s


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("method", checkpoint.METHODS)
def test_every_method_saves_for_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    from rallypoint.ops.bench import checkpoint_run  # imports torch's checkpointing

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(checkpoint_run, "_WIDTH", 64)
    monkeypatch.setattr(checkpoint_run, "_BATCH", 8)
    place = tmp_path / "place"
    place.mkdir()
    saves = checkpoint_run.measure(method, str(place), 200_000, 2, "cpu")
    assert len(saves.stall_s) == len(saves.persist_s) == 2
    assert all(
        0 < stall <= took for stall, took in zip(saves.stall_s, saves.persist_s, strict=True)
    )
    assert saves.state_bytes == pytest.approx(200_000, rel=0.3)
    assert list(place.iterdir())
    if method == "ours":
        store = CheckpointStore(str(place / "ours"))
        (info,) = store.list()
        assert info.iteration == 2
        store.verify(info)
        assert saves.iteration_s
