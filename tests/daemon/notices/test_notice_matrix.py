"""Every cloud through everything that can be wrong with a notice: its watcher, against a metadata service
that speaks its protocol, and what the watch says in the end."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from typing import Any, Final

import pytest

from rallypoint.daemon.notices import watching
from rallypoint.daemon.notices.aws import AwsWatcher
from rallypoint.daemon.notices.azure import AzureWatcher
from rallypoint.daemon.notices.gcp import PREEMPTED, GcpWatcher
from rallypoint.daemon.notices.notice import Watcher
from rallypoint.daemon.notices.watching import FALSE_AFTER_S, NoticeWatch
from tests.fakes.metadata_server import ACTION, Running, azure_event, metadata_server

BOUND_S: Final = 30.0
LOOKS: Final = 6
"""Requests after which a watcher has looked again at what it has said."""
FIRST_SEEN_S: Final = 30.0
"""What GCP gives, from when its value is first seen."""


class Cloud:
    """One provider: how its service says a thing, and who watches it."""

    def __init__(self, watcher: Watcher, running: Running) -> None:
        self.watcher = watcher
        self.metadata = running.metadata

    def announce(self, left_s: float) -> None:
        """The machine goes in this many seconds, by the service's clock."""
        raise NotImplementedError

    def nonsense(self) -> None:
        """An answer that its protocol does not have."""
        raise NotImplementedError

    def remembered(self, left_s: float) -> dict[str, float]:
        """What an earlier life of the supervisor has kept, for the announcement to have that much left."""
        return {}


class Aws(Cloud):
    def announce(self, left_s: float) -> None:
        at = datetime.fromtimestamp(self.metadata.time(left_s), UTC).isoformat()
        self.metadata.set(aws={ACTION: json.dumps({"action": "terminate", "time": at})})

    def nonsense(self) -> None:
        self.metadata.set(aws={ACTION: "<html>"})


class Gcp(Cloud):
    """It tells no time: the deadline counts from when the value was first seen."""

    def announce(self, left_s: float) -> None:
        self.metadata.set_gcp("preempted", "TRUE")

    def nonsense(self) -> None:
        self.metadata.set_gcp("preempted", "<html>")

    def remembered(self, left_s: float) -> dict[str, float]:
        return {"gcp preempted TRUE": self.metadata.time(left_s)}


class Azure(Cloud):
    def announce(self, left_s: float) -> None:
        at = formatdate(self.metadata.time(left_s), usegmt=True)
        self.metadata.set(azure=[azure_event(NotBefore=at)], azure_body=None)

    def nonsense(self) -> None:
        self.metadata.set(azure_body='{"Events": "none"}')


MAKE: Final[dict[str, Callable[[Running], Cloud]]] = {
    "aws": lambda running: Aws(AwsWatcher(running.url), running),
    "gcp": lambda running: Gcp(GcpWatcher(running.url, PREEMPTED, poll_s=0), running),
    "azure": lambda running: Azure(AzureWatcher(running.url), running),
}


@pytest.fixture(params=sorted(MAKE))
def cloud(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """Its service runs; looks follow each other without a pause."""
    monkeypatch.setattr(watching, "_RETRY_S", 0.0)
    for kind in (AwsWatcher, GcpWatcher, AzureWatcher):
        monkeypatch.setattr(kind, "every_s", 0.0)
    with metadata_server() as running:
        yield MAKE[request.param](running)


class Heard:
    """What the watch said, in a run that ends when ``enough`` says so."""

    def __init__(self, cloud: Cloud, folder: Path, left_s: float | None = None) -> None:
        self.cloud = cloud
        self.notices: list[float] = []
        self.false: list[str] = []
        self.sources: set[str] = set()
        memory = folder / "notices.json"
        if left_s is not None and (kept := cloud.remembered(left_s)):
            memory.write_text(json.dumps(kept))
        self._watch = NoticeWatch(
            [cloud.watcher], memory, on_notice=self._take, on_hint=self._none, on_false=self._false
        )

    def _take(self, source: str, left_s: float, text: str) -> None:
        self.sources.add(source)
        self.notices.append(left_s)

    def _false(self, source: str, text: str) -> None:
        self.false.append(source)

    def _none(self, source: str, text: str) -> None:
        raise AssertionError(f"{source} gave a hint: {text}")

    def until(self, enough: Callable[[], bool], and_then: Callable[[], None] | None = None) -> None:
        """Watch until something holds; then, where more is to come, until the service was asked some
        times more."""

        async def run() -> None:
            task = asyncio.create_task(self._watch.run())
            try:
                async with asyncio.timeout(BOUND_S):
                    await _becomes(enough, task)
                    if and_then is not None:
                        and_then()
                        asked = len(self.cloud.metadata.requests)
                        await _becomes(
                            lambda: len(self.cloud.metadata.requests) >= asked + LOOKS, task
                        )
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

        asyncio.run(run())


async def _becomes(enough: Callable[[], bool], task: "asyncio.Task[Any]") -> None:
    while not enough():
        assert not task.done(), task.exception()
        await asyncio.sleep(0.005)


def asked(cloud: Cloud, status: int, times: int = 1) -> Callable[[], bool]:
    """The service has given this answer so often."""
    return lambda: [s for *_, s in cloud.metadata.requests].count(status) >= times


def are(said_s: list[float], *announced_s: float) -> bool:
    """These, told to the second; a look may come late on a busy machine, by the bound of a run at most."""
    pairs = zip(said_s, announced_s, strict=True)
    return all(announced - BOUND_S <= said <= announced + 1.0 for said, announced in pairs)


def test_a_notice_is_said_with_its_source_and_time(cloud: Cloud, tmp_path: Path) -> None:
    cloud.announce(FIRST_SEEN_S)
    heard = Heard(cloud, tmp_path)
    heard.until(lambda: bool(heard.notices))
    assert are(heard.notices, FIRST_SEEN_S)
    assert heard.sources == {type(cloud).__name__.lower()}


def test_a_late_one_is_said_with_less_than_nothing_left(cloud: Cloud, tmp_path: Path) -> None:
    cloud.announce(-10.0)
    heard = Heard(cloud, tmp_path, left_s=-10.0)
    heard.until(lambda: bool(heard.notices))
    assert are(heard.notices, -10.0)


def test_a_false_one_is_no_reason_to_leave(cloud: Cloud, tmp_path: Path) -> None:
    """The machine is there long after it was to go."""
    cloud.announce(-FALSE_AFTER_S - 20.0)
    heard = Heard(cloud, tmp_path, left_s=-FALSE_AFTER_S - 20.0)
    heard.until(lambda: bool(heard.false), and_then=lambda: None)
    assert (heard.notices, len(heard.false)) == ([], 1), "and it is said once"


def test_a_repeated_one_is_said_once(cloud: Cloud, tmp_path: Path) -> None:
    cloud.announce(FIRST_SEEN_S)
    heard = Heard(cloud, tmp_path)
    heard.until(lambda: bool(heard.notices), and_then=lambda: None)
    assert len(heard.notices) == 1


def test_a_malformed_answer_is_none_and_the_next_one_counts(cloud: Cloud, tmp_path: Path) -> None:
    cloud.nonsense()
    heard = Heard(cloud, tmp_path)
    heard.until(asked(cloud, 200, 3))
    assert heard.notices == []
    cloud.announce(FIRST_SEEN_S)
    heard.until(lambda: bool(heard.notices))
    assert len(heard.notices) == 1


def test_a_service_that_was_down_is_heard_when_it_is_back(cloud: Cloud, tmp_path: Path) -> None:
    cloud.announce(FIRST_SEEN_S)
    cloud.metadata.set(status=503)
    heard = Heard(cloud, tmp_path)
    heard.until(asked(cloud, 503, 3))
    assert heard.notices == []
    cloud.metadata.set(status=None)
    heard.until(lambda: bool(heard.notices))
    assert len(heard.notices) == 1


def test_no_proxy_is_asked(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment names: nobody listens there."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    cloud.announce(FIRST_SEEN_S)
    heard = Heard(cloud, tmp_path)
    heard.until(lambda: bool(heard.notices))


@pytest.mark.parametrize("cloud", ["aws"], indirect=True)
def test_a_token_that_expires_between_two_looks_hides_nothing(cloud: Cloud, tmp_path: Path) -> None:
    heard = Heard(cloud, tmp_path)
    heard.until(asked(cloud, 404, 2))
    cloud.metadata.tokens.clear()
    cloud.announce(FIRST_SEEN_S)
    heard.until(lambda: bool(heard.notices))
    assert asked(cloud, 401)(), "the token was refused"
    assert len(heard.notices) == 1


@pytest.mark.parametrize("cloud", ["aws", "azure"], indirect=True)
def test_one_that_comes_nearer_is_said_again(cloud: Cloud, tmp_path: Path) -> None:
    cloud.announce(FIRST_SEEN_S)
    heard = Heard(cloud, tmp_path)
    heard.until(lambda: bool(heard.notices), and_then=lambda: cloud.announce(10.0))
    assert are(heard.notices, FIRST_SEEN_S, 10.0)


@pytest.mark.parametrize("cloud", ["azure"], indirect=True)
def test_one_that_was_called_off_is_none(cloud: Cloud, tmp_path: Path) -> None:
    cloud.metadata.set(azure=[azure_event(EventStatus="Canceled")])
    heard = Heard(cloud, tmp_path)
    heard.until(lambda: cloud.metadata.count("scheduledevents") >= 2)
    assert (heard.notices, heard.false) == ([], [])
    asyncio.run(cloud.watcher.left())
    assert cloud.metadata.approved == []
