"""Which storage a URL names."""

import re
from pathlib import Path
from typing import Final

from rallypoint.checkpointing.credentials import Credentials
from rallypoint.checkpointing.errors import UnsupportedUrl
from rallypoint.checkpointing.objects import PACKAGES, FsspecStorage
from rallypoint.checkpointing.storage import LocalStorage, Storage
from rallypoint.daemon.shared.rundir import half_a_url, looks_like_url

_URL: Final = re.compile(r"([^/:]+)://(.*)", re.DOTALL)
_USER: Final = re.compile(r"[^/]*@")


def open_storage(url: str, credentials_file: str | None = None) -> Storage:
    """The storage at a path, or at a ``file://``, ``s3://``, ``gs://``, ``az://`` or ``memory://`` URL
    (the last lives and dies with the process). Touches nothing.

    Raises `UnsupportedUrl`, a `ConfigError`, for any other one, and where a package is missing."""
    match = _URL.fullmatch(url)
    if looks_like_url(url):
        raise UnsupportedUrl(half_a_url(url))
    if match is None and url and "://" not in url:
        return LocalStorage(Path(url))
    if match and match[1] == "file" and match[2].startswith("/"):
        return LocalStorage(Path(match[2]))
    if match and _USER.match(match[2]):
        raise UnsupportedUrl(
            f"a checkpoint URL ({match[1]}://…@…) must not hold credentials, since it is shown and "
            "logged: put them into checkpoint.credentials_file, or where the backend finds them"
        )
    if match and match[1] in (*PACKAGES, "memory") and match[2].strip("/"):
        return FsspecStorage(url, Credentials(credentials_file))
    raise UnsupportedUrl(
        f"checkpoint URL {url!r} is not supported; give a local directory, as a path or as "
        "file:///absolute/path, or s3://bucket/path, gs://bucket/path, az://container/path"
    )
