"""An fsspec file system in memory whose operations fail as a test says: ``faulty://``."""

import datetime
from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

Fault = Callable[[str, str], None]
"""Called with (operation, path) before each operation; raises what the store answers."""


class ProviderError(Exception):
    """An error of the backend's own library: no OSError."""


def no_fault(operation: str, path: str) -> None:
    """A store in good health."""


class FaultyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Operations: ``put``, ``get``, ``stat``, ``list``, ``remove``."""

    protocol = "faulty"
    root_marker = ""
    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fault: ClassVar[Fault] = staticmethod(no_fault)
    change: ClassVar[Callable[[str, bytes], bytes]] = staticmethod(lambda path, data: data)
    """What arrives of what is put."""
    stale: ClassVar[dict[str, Any] | None] = None
    """A listing that is given instead of the true one."""
    fired: ClassVar[int] = 0
    """Faults raised, and changes made."""

    @classmethod
    def reset(cls) -> None:
        """In good health, and empty."""
        cls.store.clear()
        cls.heal()

    @classmethod
    def heal(cls) -> None:
        """In good health; keeps what is there."""
        cls.fault = staticmethod(no_fault)
        cls.change = staticmethod(lambda path, data: data)
        cls.stale = None
        cls.fired = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("faulty://", "memory://")))

    def _operate(self, operation: str, path: str) -> None:
        cls = type(self)
        try:
            cls.fault(operation, path)
        except BaseException:  # whatever a test raises has fired
            cls.fired += 1
            raise

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self._operate("put", path)
        changed = type(self).change(path, value)
        type(self).fired += changed != value
        super().pipe_file(path, changed, mode=mode, **kwargs)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "rb":
            self._operate("get", path)
        return super()._open(path, mode, **kwargs)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        self._operate("stat", path)
        info: dict[str, Any] = super().info(path, **kwargs)
        # A clock that is years off.
        return {**info, "created": datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)}

    def exists(self, path: str, **kwargs: Any) -> bool:
        self._operate("stat", path)
        return bool(super().exists(path, **kwargs))

    def find(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self._operate("list", path)
        cls = type(self)
        if cls.stale is not None:
            cls.fired += 1
            return cls.stale
        return super().find(path, *args, **kwargs)

    def rm_file(self, path: str) -> None:
        self._operate("remove", path)
        super()._rm(path)


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
