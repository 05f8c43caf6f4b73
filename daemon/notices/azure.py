"""Azure: scheduled events, which this node approves once it has left.

https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

from email.utils import parsedate_to_datetime
from typing import Final, Literal

import msgspec

from rallypoint.daemon.notices.http import TIMEOUT_S, Answer, ask
from rallypoint.daemon.notices.notice import MetadataError, Notice

EVERY_S: Final = 1.0
"""Azure recommends to look every second: Preempt gives 30."""
FIRST_S: Final = 150.0
"""The first request of a machine may take two minutes: it switches the service on."""
_HEADERS: Final = {"Metadata": "true"}
_EVENTS: Final = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME: Final = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_LEAVE: Final = ("Preempt", "Terminate", "Reboot", "Redeploy")


class _Event(msgspec.Struct, rename="pascal"):
    """One scheduled event, as far as it is needed."""

    event_id: str
    event_type: str
    resources: tuple[str, ...] = ()
    event_status: Literal["Scheduled", "Started", "Completed", "Canceled"] = "Scheduled"
    not_before: str = ""
    """GMT, as in HTTP; empty once it has started."""


class _Document(msgspec.Struct, rename="pascal"):
    """Body of the answer."""

    events: tuple[_Event, ...]


class AzureWatcher:
    """``base`` is the address of the metadata service."""

    name: Final = "azure"
    every_s: Final = EVERY_S

    def __init__(self, base: str) -> None:
        self._base = base
        self._machine = ""
        """Name of this virtual machine, as events call it; "": not asked yet."""
        self._answered = False
        self._pending: tuple[str, ...] = ()
        """Events that this node leaves for, as of the newest look."""

    async def look(self) -> tuple[Notice, ...]:
        """Events of this machine that end it are notices; a freeze is a hint. Raises `MetadataError`."""
        if not self._machine:
            answer = await ask(self._base, _NAME, _HEADERS)
            answer.expect_ok(_NAME)
            self._machine = answer.text.strip()
        timeout_s = TIMEOUT_S if self._answered else FIRST_S
        answer = await ask(self._base, _EVENTS, _HEADERS, timeout_s=timeout_s)
        answer.expect_ok(_EVENTS)
        self._answered = True
        mine = [e for e in _decode(answer).events if self._machine in e.resources]
        there = [e for e in mine if e.event_status in ("Scheduled", "Started")]
        self._pending = tuple(e.event_id for e in there if e.event_type in _LEAVE)
        return tuple(_notice(event, answer) for event in there)

    async def left(self) -> None:
        """Approve: Azure need not wait any longer. Raises `MetadataError`."""
        if not self._pending:
            return
        requests = [{"EventId": event} for event in self._pending]
        body = msgspec.json.encode({"StartRequests": requests}).decode()
        answer = await ask(self._base, _EVENTS, _HEADERS, method="POST", body=body)
        answer.expect_ok(_EVENTS)


def _decode(answer: Answer) -> _Document:
    try:
        return msgspec.json.decode(answer.text, type=_Document)
    except msgspec.MsgspecError as error:
        text = answer.text.strip()[:120]
        raise MetadataError(f"{_EVENTS}: {error} in {text!r}") from error


def _notice(event: _Event, answer: Answer) -> Notice:
    what = f"Azure: {event.event_type} of this machine"
    if event.event_type not in _LEAVE:
        return Notice("azure", f"azure {event.event_id}", None, f"{what}, after which it goes on")
    if event.event_status == "Started" or not event.not_before:
        return Notice("azure", f"azure {event.event_id}", 0.0, f"{what} has started", lasts=True)
    try:
        at_s = parsedate_to_datetime(event.not_before).timestamp()
    except ValueError as error:
        raise MetadataError(f"{_EVENTS}: NotBefore = {event.not_before[:40]!r}") from error
    left_s = at_s - answer.now_unix_s
    return Notice(
        "azure", f"azure {event.event_id}", left_s, f"{what} not before {event.not_before}"
    )
