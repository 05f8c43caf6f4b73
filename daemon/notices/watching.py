"""All watchers of a node: each looks on for ever, and what it sees is said once."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog

from rallypoint.daemon.executors.files import write_atomically
from rallypoint.daemon.notices.aws import AwsWatcher
from rallypoint.daemon.notices.azure import AzureWatcher
from rallypoint.daemon.notices.gcp import MAINTENANCE, PREEMPTED, GcpWatcher
from rallypoint.daemon.notices.notice import MetadataError, Notice, Source, Watcher
from rallypoint.daemon.shared.config import PreemptionSection

FALSE_AFTER_S: Final = 60.0
"""A notice whose deadline passed this long ago, on a machine that is still there, was false."""
_RETRY_S: Final = 5.0
_APPROVE_S: Final = 2.0

_log = structlog.get_logger(__name__)


def watchers_of(section: PreemptionSection) -> tuple[Watcher, ...]:
    """The watchers that the configuration names; none by default."""
    found: list[Watcher] = []
    if "aws" in section.sources:
        found.append(AwsWatcher(section.aws_url))
    if "gcp" in section.sources:
        found += [GcpWatcher(section.gcp_url, key) for key in (PREEMPTED, MAINTENANCE)]
    if "azure" in section.sources:
        found.append(AzureWatcher(section.azure_url))
    return tuple(found)


class NoticeWatch:
    """What is read again is not said again. ``on_notice`` takes the source, the seconds that are left and
    the text; ``on_hint`` and ``on_false`` take the source and the text. ``memory`` is a file that keeps
    the deadlines of notices that were seen, so that a node that is started again after a false one knows
    it."""

    def __init__(
        self,
        watchers: Sequence[Watcher],
        memory: Path,
        *,
        on_notice: Callable[[Source, float, str], None],
        on_hint: Callable[[Source, str], None],
        on_false: Callable[[Source, str], None],
    ) -> None:
        self._watchers = watchers
        self._memory = memory
        self._on_notice = on_notice
        self._on_hint = on_hint
        self._on_false = on_false
        self._deadlines = _read(memory)
        """By notice: when the machine goes, by this machine's clock."""
        self._said: dict[str, float | None] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        await asyncio.gather(*(self._watch(watcher) for watcher in self._watchers))

    async def left(self) -> None:
        """This node has left on a notice: tell the sources, within two seconds."""
        for watcher in self._watchers:
            try:
                async with asyncio.timeout(_APPROVE_S):
                    await watcher.left()
            except (MetadataError, TimeoutError) as error:
                _log.warning("notice_not_approved", source=watcher.name, reason=str(error))

    async def _watch(self, watcher: Watcher) -> None:
        trouble = ""
        while True:
            pause_s = watcher.every_s
            try:
                notices = await watcher.look()
            except MetadataError as error:
                if str(error) != trouble:
                    trouble = str(error)
                    _log.warning("metadata_unavailable", source=watcher.name, reason=trouble)
                pause_s = max(pause_s, _RETRY_S)
            else:
                if trouble:
                    trouble = ""
                    _log.info("metadata_back", source=watcher.name)
                for notice in notices:
                    self.take(notice, time.time())
            await asyncio.sleep(pause_s)

    def take(self, notice: Notice, now_unix_s: float) -> None:
        """Say a notice, unless it was said before with no later deadline, or is known to be false."""
        if notice.left_s is None:
            if notice.id not in self._said:
                self._said[notice.id] = None
                self._on_hint(notice.source, notice.text)
            return
        known_s = self._deadlines.get(notice.id)
        deadline_s = now_unix_s + notice.left_s
        if known_s is not None and (notice.lasts or known_s < deadline_s):
            deadline_s = known_s
        if known_s is None or deadline_s < known_s:
            self._remember(notice.id, deadline_s)
        said_s = self._said.get(notice.id)
        if said_s is not None and deadline_s > said_s - 1.0:  # services tell whole seconds
            return
        self._said[notice.id] = deadline_s
        left_s = deadline_s - now_unix_s
        if left_s < -FALSE_AFTER_S:
            text = f"{notice.text}: {-left_s:.0f} s ago, and this machine is still there"
            self._on_false(notice.source, text)
            return
        self._on_notice(notice.source, left_s, notice.text)

    def _remember(self, notice: str, deadline_s: float) -> None:
        self._deadlines[notice] = deadline_s
        try:
            write_atomically(self._memory, msgspec.json.encode(self._deadlines))
        except OSError as error:
            _log.error("notice_not_kept", path=str(self._memory), reason=error.strerror)


def _read(memory: Path) -> dict[str, float]:
    try:
        return msgspec.json.decode(memory.read_bytes(), type=dict[str, float])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        _log.warning("notices_forgotten", path=str(memory), reason=str(error))
        return {}
