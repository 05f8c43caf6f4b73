"""Watchers against fake metadata services that speak the clouds' protocols."""

import asyncio
import json
from collections.abc import Coroutine, Iterator
from datetime import UTC, datetime
from typing import Any, TypeVar

import pytest

from rallypoint.daemon.notices.aws import AwsWatcher
from rallypoint.daemon.notices.azure import AzureWatcher
from rallypoint.daemon.notices.gcp import MAINTENANCE, PREEMPTED, GcpWatcher
from rallypoint.daemon.notices.http import ask
from rallypoint.daemon.notices.notice import MetadataError, Notice
from tests.fakes.metadata_server import (
    ACTION,
    EVENTS,
    REBALANCE,
    Metadata,
    Running,
    azure_event,
    metadata_server,
)

T = TypeVar("T")
BOUND_S = 60.0


@pytest.fixture
def cloud() -> Iterator[Running]:
    with metadata_server() as running:
        yield running


def do(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, BOUND_S))


def iso(metadata: Metadata, left_s: float) -> str:
    return datetime.fromtimestamp(metadata.time(left_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def terminate(metadata: Metadata, left_s: float = 120.0) -> None:
    body = json.dumps({"action": "terminate", "time": iso(metadata, left_s)})
    metadata.set(aws={**metadata.aws, ACTION: body})


def one(notices: tuple[Notice, ...]) -> Notice:
    (notice,) = notices
    return notice


# --- AWS -----------------------------------------------------------------------------------------


def test_aws_has_nothing_then_a_notice_with_its_time(cloud: Running) -> None:
    watcher = AwsWatcher(cloud.url)
    assert do(watcher.look()) == ()
    terminate(cloud.metadata, 90.0)
    notice = one(do(watcher.look()))
    assert notice.left_s == pytest.approx(90.0, abs=2.0)
    assert "terminate" in notice.text
    assert one(do(watcher.look())).id == notice.id, "the same notice read again"
    assert cloud.metadata.count("api/token") == 1


def test_aws_an_expired_token_is_renewed_and_the_question_asked_again(cloud: Running) -> None:
    watcher = AwsWatcher(cloud.url)
    do(watcher.look())
    cloud.metadata.tokens.clear()  # the service forgot it, long before its time
    terminate(cloud.metadata)
    assert one(do(watcher.look())).left_s is not None
    statuses = [status for _, path, status in cloud.metadata.requests if path == ACTION]
    assert statuses == [404, 401, 200]


def test_aws_a_token_is_renewed_before_it_expires(cloud: Running) -> None:
    watcher = AwsWatcher(cloud.url, token_s=0)
    cloud.metadata.set(token_life_s=100.0)
    for _ in range(2):
        do(watcher.look())
    assert 401 not in [status for _, _, status in cloud.metadata.requests]
    assert cloud.metadata.count("api/token") > 1


def test_aws_tokens_that_are_refused_at_once_are_an_error_not_a_loop(cloud: Running) -> None:
    cloud.metadata.set(token_life_s=-1.0)
    with pytest.raises(MetadataError, match="status 401"):
        do(AwsWatcher(cloud.url).look())
    assert cloud.metadata.count("api/token") == 2


def test_aws_rebalance_is_a_hint_without_a_deadline(cloud: Running) -> None:
    cloud.metadata.set(aws={REBALANCE: json.dumps({"noticeTime": "2026-01-01T00:00:00Z"})})
    notice = one(do(AwsWatcher(cloud.url).look()))
    assert notice.left_s is None
    assert "rebalance" in notice.text


def test_aws_time_is_by_the_clock_of_the_service(cloud: Running) -> None:
    """A machine whose clock is an hour late must not take a notice for one that is an hour ahead."""
    for ahead_s in (3600.0, -3600.0):
        cloud.metadata.set(clock_ahead_s=ahead_s)
        terminate(cloud.metadata, 100.0)
        assert one(do(AwsWatcher(cloud.url).look())).left_s == pytest.approx(100.0, abs=2.0)


def test_aws_a_late_notice_has_less_than_nothing_left(cloud: Running) -> None:
    terminate(cloud.metadata, -10.0)
    left_s = one(do(AwsWatcher(cloud.url).look())).left_s
    assert left_s == pytest.approx(-10.0, abs=2.0)


@pytest.mark.parametrize("body", ["", "<html>", "[]", '{"time": "2026-01-01T00:00:00Z"}', "{"])
def test_aws_a_malformed_action_is_said_with_what_came(cloud: Running, body: str) -> None:
    cloud.metadata.set(aws={ACTION: body})
    with pytest.raises(MetadataError, match="instance-action"):
        do(AwsWatcher(cloud.url).look())


@pytest.mark.parametrize("time", ["soon", "", "2026-13-41T00:00:00Z"])
def test_aws_an_action_whose_time_cannot_be_read_is_a_notice_of_two_minutes(
    cloud: Running, time: str
) -> None:
    cloud.metadata.set(aws={ACTION: json.dumps({"action": "stop", "time": time})})
    notice = one(do(AwsWatcher(cloud.url).look()))
    assert (notice.left_s, notice.lasts) == (120.0, True)


# --- GCP -----------------------------------------------------------------------------------------


def test_gcp_answers_at_once_then_holds_back_until_it_changes(cloud: Running) -> None:
    async def watch() -> Notice:
        watcher = GcpWatcher(cloud.url, PREEMPTED)
        assert await watcher.look() == ()
        waiting = asyncio.create_task(watcher.look())
        assert await asyncio.to_thread(cloud.metadata.polled.wait, 10.0)
        assert not waiting.done()
        cloud.metadata.set_gcp("preempted", "TRUE")
        return one(await waiting)

    notice = do(watch())
    assert (notice.left_s, notice.lasts) == (30.0, True)
    asked = [path for _, path, _ in cloud.metadata.requests]
    assert "wait_for_change=true&last_etag=etag-FALSE&timeout_sec=60" in asked[-1]


def test_gcp_a_change_between_two_looks_is_not_missed(cloud: Running) -> None:
    async def watch() -> tuple[Notice, ...]:
        watcher = GcpWatcher(cloud.url, PREEMPTED)
        await watcher.look()
        cloud.metadata.set_gcp("preempted", "TRUE")
        return await watcher.look()

    assert one(do(watch())).left_s == 30.0


def test_gcp_a_poll_without_a_change_ends_and_goes_on(cloud: Running) -> None:
    async def watch() -> list[tuple[Notice, ...]]:
        watcher = GcpWatcher(cloud.url, PREEMPTED, poll_s=0)
        return [await watcher.look() for _ in range(3)]

    assert do(watch()) == [(), (), ()]


@pytest.mark.parametrize(
    ("value", "left_s"),
    [
        ("NONE", None),
        ("MIGRATE_ON_HOST_MAINTENANCE", None),
        ("TERMINATE_ON_HOST_MAINTENANCE", 60.0),
    ],
)
def test_gcp_only_a_maintenance_that_terminates_is_a_notice(
    cloud: Running, value: str, left_s: float | None
) -> None:
    cloud.metadata.set_gcp("maintenance-event", value)
    found = do(GcpWatcher(cloud.url, MAINTENANCE).look())
    assert [notice.left_s for notice in found] == ([] if left_s is None else [left_s])


@pytest.mark.parametrize("value", ["", "yes", "<html>login</html>"])
def test_gcp_a_malformed_value_is_said(cloud: Running, value: str) -> None:
    cloud.metadata.set_gcp("preempted", value)
    with pytest.raises(MetadataError, match="no value of it"):
        do(GcpWatcher(cloud.url, PREEMPTED).look())


def test_gcp_whoever_is_not_google_is_not_believed(cloud: Running) -> None:
    cloud.metadata.set_gcp("preempted", "TRUE")
    cloud.metadata.set(flavor="")
    with pytest.raises(MetadataError, match="not by Google"):
        do(GcpWatcher(cloud.url, PREEMPTED).look())


# --- Azure ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_azure_an_event_that_ends_this_machine_is_a_notice(cloud: Running, kind: str) -> None:
    watcher = AzureWatcher(cloud.url)
    assert do(watcher.look()) == ()
    cloud.metadata.set(azure=[azure_event(kind=kind)])
    notice = one(do(watcher.look()))
    assert notice.left_s == pytest.approx(30.0, abs=2.0)
    assert kind in notice.text


def test_azure_a_freeze_is_a_hint_and_other_machines_events_are_nothing(cloud: Running) -> None:
    events = [azure_event("a", "Freeze"), azure_event("b", Resources=["vm-2"])]
    cloud.metadata.set(azure=events)
    watcher = AzureWatcher(cloud.url)
    assert one(do(watcher.look())).left_s is None
    do(watcher.left())
    assert cloud.metadata.approved == []


def test_azure_an_event_is_approved_once_the_node_has_left(cloud: Running) -> None:
    events = [azure_event("a"), azure_event("b", "Freeze"), azure_event("c", Resources=["vm-2"])]
    cloud.metadata.set(azure=events)
    watcher = AzureWatcher(cloud.url)
    do(watcher.look())
    assert cloud.metadata.approved == []
    do(watcher.left())
    assert cloud.metadata.approved == ["a"]


def test_azure_an_event_that_has_started_leaves_nothing(cloud: Running) -> None:
    started = azure_event("a", EventStatus="Started", NotBefore="")
    over = azure_event("b", EventStatus="Completed", NotBefore="")
    cloud.metadata.set(azure=[started, over])
    notice = one(do(AzureWatcher(cloud.url).look()))
    assert (notice.id, notice.left_s) == ("azure a", 0.0)


@pytest.mark.parametrize("body", ["", "{}", "[]", '{"Events": [{}]}', '{"Events": "none"}'])
def test_azure_a_malformed_document_is_said(cloud: Running, body: str) -> None:
    cloud.metadata.set(azure_body=body)
    with pytest.raises(MetadataError, match="scheduledevents"):
        do(AzureWatcher(cloud.url).look())


def test_azure_a_time_that_cannot_be_read_is_said(cloud: Running) -> None:
    cloud.metadata.set(azure=[azure_event(NotBefore="soon")])
    with pytest.raises(MetadataError, match="NotBefore = 'soon'"):
        do(AzureWatcher(cloud.url).look())
    assert cloud.metadata.count(EVENTS) == 1


# --- the connection --------------------------------------------------------------------------------


def test_no_proxy_of_the_environment_is_asked(
    cloud: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert do(AwsWatcher(cloud.url).look()) == ()


def test_nobody_there_is_an_error_in_words() -> None:
    with metadata_server() as gone:
        url = gone.url
    with pytest.raises(MetadataError, match="instance/preempted"):
        do(GcpWatcher(url, PREEMPTED).look())


def test_who_says_nothing_is_given_up() -> None:
    async def work() -> None:
        async def listen(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await silent.wait()
            writer.close()

        silent = asyncio.Event()
        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(MetadataError, match="no answer within"):
            await ask(f"http://127.0.0.1:{port}", "/", {}, timeout_s=0.05)
        silent.set()
        server.close()

    do(work())


@pytest.mark.parametrize(
    "said", [b"", b"hello\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx"]
)
def test_what_is_no_whole_answer_is_an_error(said: bytes) -> None:
    async def work() -> None:
        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
            writer.close()

        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(MetadataError, match="no HTTP answer"):
            await ask(f"http://127.0.0.1:{port}", "/", {})
        server.close()

    do(work())
