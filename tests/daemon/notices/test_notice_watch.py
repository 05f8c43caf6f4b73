"""What several looks at several sources become: each notice once, with its nearest deadline."""

import asyncio
import json
from pathlib import Path

import pytest

from rallypoint.daemon.notices.notice import MetadataError, Notice, Watcher
from rallypoint.daemon.notices.watching import FALSE_AFTER_S, NoticeWatch, watchers_of
from rallypoint.daemon.shared.config import PreemptionSection

NOW_S = 1_000_000.0


class Scripted:
    """A source that says one thing after the other, and then waits for ever."""

    name = "scripted"
    every_s = 0.0

    def __init__(self, *looks: tuple[Notice, ...] | MetadataError) -> None:
        self._looks = list(looks)
        self.over = asyncio.Event()
        self.told = 0

    async def look(self) -> tuple[Notice, ...]:
        if not self._looks:
            self.over.set()
            await asyncio.Event().wait()
        found = self._looks.pop(0)
        if isinstance(found, MetadataError):
            raise found
        return found

    async def left(self) -> None:
        self.told += 1
        raise MetadataError("the service is down")


class Heard:
    def __init__(self, memory: Path, *watchers: Watcher) -> None:
        self.notices: list[tuple[float, str]] = []
        self.hints: list[str] = []
        self.false: list[str] = []
        self.watch = NoticeWatch(
            watchers,
            memory,
            on_notice=lambda source, left_s, text: self.notices.append((round(left_s, 3), text)),
            on_hint=lambda source, text: self.hints.append(text),
            on_false=lambda source, text: self.false.append(source),
        )

    def take(self, notice: Notice, now_s: float = NOW_S) -> "Heard":
        self.watch.take(notice, now_s)
        return self


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "notices.json"


def test_a_repeated_notice_is_said_once_and_again_when_it_comes_nearer(memory: Path) -> None:
    heard = Heard(memory)
    for now_s, left_s in ((0.0, 30.0), (5.0, 25.0), (6.0, 24.4), (7.0, 60.0), (8.0, 10.0)):
        heard.take(Notice("aws", "a", left_s, "spot"), NOW_S + now_s)
    assert heard.notices == [(30.0, "spot"), (10.0, "spot")]


def test_a_notice_without_a_time_counts_from_when_it_was_first_seen(memory: Path) -> None:
    preempted = Notice("gcp", "gcp", 30.0, "preempted", lasts=True)
    heard = Heard(memory).take(preempted).take(preempted, NOW_S + 10)
    assert heard.notices == [(30.0, "preempted")]
    again = Heard(memory).take(preempted, NOW_S + 12)  # the next life of the supervisor
    assert again.notices == [(18.0, "preempted")]


def test_a_late_notice_is_said_with_less_than_nothing_left(memory: Path) -> None:
    assert Heard(memory).take(Notice("aws", "a", -10.0, "spot")).notices == [(-10.0, "spot")]


def test_a_false_notice_keeps_nobody_from_coming_back(memory: Path) -> None:
    preempted = Notice("gcp", "gcp", 30.0, "preempted", lasts=True)
    Heard(memory).take(preempted)
    later = Heard(memory).take(preempted, NOW_S + 30 + FALSE_AFTER_S + 1)
    assert (later.notices, later.false) == ([], ["gcp"])
    assert Heard(memory).take(Notice("aws", "aws", -FALSE_AFTER_S - 1, "spot")).notices == []
    later.take(Notice("aws", "another", 30.0, "real"), NOW_S + 200)
    assert later.notices == [(30.0, "real")]


def test_a_hint_is_said_once(memory: Path) -> None:
    heard = Heard(memory)
    for _ in range(3):
        heard.take(Notice("aws", "rebalance", None, "rebalance"))
    assert (heard.hints, heard.notices) == (["rebalance"], [])


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", json.dumps({"a": "soon"}).encode()])
def test_a_damaged_memory_is_begun_anew(memory: Path, damage: bytes) -> None:
    memory.write_bytes(damage)
    assert Heard(memory).take(Notice("aws", "a", 30.0, "spot")).notices == [(30.0, "spot")]
    assert json.loads(memory.read_bytes()) == {"a": NOW_S + 30.0}


def test_a_memory_that_cannot_be_written_holds_no_notice_back(tmp_path: Path) -> None:
    heard = Heard(tmp_path / "missing" / "notices.json").take(Notice("aws", "a", 30.0, "spot"))
    assert heard.notices == [(30.0, "spot")]


def test_a_source_in_trouble_is_asked_again_and_disturbs_no_other(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rallypoint.daemon.notices.watching._RETRY_S", 0.0)

    async def run() -> Heard:
        down = Scripted(
            MetadataError("down"), MetadataError("down"), (Notice("aws", "b", 20.0, "from b"),)
        )
        fine = Scripted((), (Notice("aws", "a", 30.0, "from a"),))
        heard = Heard(memory, down, fine)
        task = asyncio.create_task(heard.watch.run())
        await asyncio.wait_for(asyncio.gather(down.over.wait(), fine.over.wait()), 10)
        task.cancel()
        await heard.watch.left()  # a source that cannot be told is logged, and holds nobody up
        assert (down.told, fine.told) == (1, 1)
        return heard

    assert sorted(asyncio.run(run()).notices) == [(20.0, "from b"), (30.0, "from a")]


def test_only_what_is_named_is_asked() -> None:
    assert watchers_of(PreemptionSection()) == ()
    assert watchers_of(PreemptionSection(sources=("slurm", "kubernetes", "signal"))) == ()
    named = watchers_of(PreemptionSection(sources=("aws", "gcp", "azure")))
    assert [watcher.name for watcher in named] == [
        *("aws", "gcp preempted", "gcp maintenance-event", "azure")
    ]
