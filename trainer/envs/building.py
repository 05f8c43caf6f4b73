"""A simulator that is built beside the one that steps, in a thread."""

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rallypoint.trainer.errors import is_out_of_memory


class _Closed(Protocol):
    def close(self) -> None: ...


S = TypeVar("S", bound=_Closed)


class Building(Generic[S]):
    """One build of so many envs. While it runs, the simulator that steps and this one share the global
    random state of the process."""

    def __init__(self, build: Callable[[int], S], count: int) -> None:
        self.count = count
        self._build = build
        self._lock = threading.Lock()
        self._dropped = False
        self._built: S | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="env-building", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether `take` returns at once."""
        return not self._thread.is_alive()

    def take(self) -> S | None:
        """What was built, waited for; None: there was not enough memory for two. Raises what the build
        raised."""
        self._thread.join()
        if self._error is not None and not is_out_of_memory(self._error):
            raise self._error
        built, self._built = self._built, None
        return built

    def drop(self) -> None:
        """It is not wanted any more: closed at once, or by its thread as soon as it is built."""
        with self._lock:
            self._dropped = True
            built, self._built = self._built, None
        if built is not None:
            built.close()

    def _run(self) -> None:
        try:
            built = self._build(self.count)
        except BaseException as error:  # noqa: BLE001 - raised again by `take`, in the thread that asks
            self._error = error
            return
        with self._lock:
            if not self._dropped:
                self._built = built
                return
        built.close()
