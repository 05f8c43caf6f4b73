"""A storage whose user dies right before a chosen operation."""

from collections.abc import Callable, Iterable, Iterator

from rallypoint.checkpointing.storage import Buffer, ReadableFile, Storage


class Killed(BaseException):
    """Stands for a SIGKILL where the storage lives in this process: no handler of errors sees it."""


class DyingStorage:
    """Counts every operation, and every part that a file is made of."""

    def __init__(self, inner: Storage, survives: int, die: Callable[[], None]) -> None:
        """``die`` is called before the operation that follows ``survives`` others."""
        self._inner = inner
        self._left = survives
        self._die = die

    def _step(self) -> None:
        if self._left == 0:
            self._die()
        self._left -= 1

    @property
    def root(self) -> str:
        return self._inner.root

    def claim(self, directory: str) -> None:
        self._step()
        self._inner.claim(directory)

    def create(self, directory: str, name: str, parts: Iterable[Buffer]) -> None:
        def counted() -> Iterator[Buffer]:
            for part in parts:
                self._step()
                yield part

        self._step()
        self._inner.create(directory, name, counted())

    def put_if_absent(self, directory: str, name: str, data: bytes) -> None:
        self._step()
        self._inner.put_if_absent(directory, name, data)

    def open(self, directory: str, name: str) -> ReadableFile:
        self._step()
        return self._inner.open(directory, name)

    def list(self, wanted: Callable[[str], bool]) -> dict[str, dict[str, int]]:
        self._step()
        return self._inner.list(wanted)

    def remove(self, directory: str, names: Iterable[str]) -> None:
        for name in names:
            self._step()
            self._inner.remove(directory, (name,))
        self._step()
        self._inner.remove(directory, ())
