"""Google Compute Engine: preemption and host maintenance, by a long poll for each.

https://cloud.google.com/compute/docs/metadata/querying-metadata
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from rallypoint.daemon.notices.http import TIMEOUT_S, ask
from rallypoint.daemon.notices.notice import MetadataError, Notice

POLL_S: Final = 60
"""How long the service may hold an answer back while nothing changes."""
_FLAVOR: Final = {"Metadata-Flavor": "Google"}
_INSTANCE: Final = "/computeMetadata/v1/instance"


@dataclass(frozen=True)
class Key:
    """A key of the instance, its value while nothing is wrong, and the values that are notices with the
    seconds that they give."""

    name: str
    calm: frozenset[str]
    notices: Mapping[str, float]


PREEMPTED: Final = Key("preempted", frozenset({"FALSE"}), MappingProxyType({"TRUE": 30.0}))
MAINTENANCE: Final = Key(
    "maintenance-event",
    frozenset({"NONE", "MIGRATE_ON_HOST_MAINTENANCE"}),
    MappingProxyType({"TERMINATE_ON_HOST_MAINTENANCE": 60.0}),
)
"""An instance with a GPU cannot be migrated; it then has an hour, others 60 s. Leaving is quick, so the
lesser is taken for both."""


class GcpWatcher:
    """One key. ``base`` is the address of the metadata server."""

    every_s: Final = 1.0

    def __init__(self, base: str, key: Key, poll_s: int = POLL_S) -> None:
        self._base = base
        self._key = key
        self._poll_s = poll_s
        self._etag = ""
        """Of the value that was read last; "": none."""

    @property
    def name(self) -> str:
        return f"gcp {self._key.name}"

    async def look(self) -> tuple[Notice, ...]:
        """The first look answers at once, later ones when the value has changed, or after a while. Raises
        `MetadataError`."""
        path, timeout_s = f"{_INSTANCE}/{self._key.name}", TIMEOUT_S
        if self._etag:
            path += f"?wait_for_change=true&last_etag={self._etag}&timeout_sec={self._poll_s}"
            timeout_s += self._poll_s
        etag, self._etag = self._etag, ""  # after an error the next look answers at once
        answer = await ask(self._base, path, _FLAVOR, timeout_s=timeout_s)
        answer.expect_ok(path)
        if answer.headers["Metadata-Flavor"] != "Google":
            raise MetadataError(
                f"{self._base}{path}: answered, but not by Google's metadata server"
            )
        value = answer.text.strip()
        if value not in self._key.calm and value not in self._key.notices:
            raise MetadataError(f"{path}: {value[:40]!r} is no value of it")
        self._etag = answer.headers["ETag"] or etag
        left_s = self._key.notices.get(value)
        if left_s is None:
            return ()
        text = f"GCP says {self._key.name} = {value}"
        return (Notice("gcp", f"{self.name} {value}", left_s, text, lasts=True),)

    async def left(self) -> None:
        """GCP does not ask for an answer."""
