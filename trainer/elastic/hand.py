"""The rollout of the iteration in progress: being collected, in hand, or none.

A rollout outlives the loss of a group: it is collected while the group is rebuilt, and used again
when its update has to be redone. It ends by being committed, or dropped when this rank takes the
state of another.
"""

import threading
from typing import Generic, Protocol, TypeVar

from rallypoint.trainer.errors import RolloutDropped


class CollectedRollout(Protocol):
    """What the session needs to know of a rollout."""

    @property
    def env_steps(self) -> int:
        """Env steps in it, over all its envs."""
        ...


R = TypeVar("R", bound=CollectedRollout)


class RolloutInHand(Generic[R]):
    """Shared by the main thread, which collects, and the thread that forms generations."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._blocks: tuple[int, ...] = ()
        self._cut: tuple[int, ...] = ()
        self._rollout: R | None = None
        self._collecting = False
        self._drop = False
        self._partial_env_steps = 0
        self._was_dropped = False

    @property
    def rollout(self) -> R | None:
        """The complete rollout, if there is one."""
        return self._rollout

    @property
    def blocks(self) -> tuple[int, ...]:
        """Env blocks of the rollout that is complete or being collected."""
        return self._blocks

    @property
    def cut(self) -> tuple[int, ...]:
        """Those of them whose envs began a new episode for it, because their rows were not there."""
        return self._cut

    @property
    def collecting(self) -> bool:
        return self._collecting

    def begin(self, blocks: tuple[int, ...], cut: tuple[int, ...] = ()) -> None:
        """The main thread starts to collect these blocks, beside those that are in hand already."""
        with self._changed:
            self._blocks, self._cut = (*self._blocks, *blocks), (*self._cut, *cut)
            self._collecting, self._drop, self._partial_env_steps = True, False, 0

    def stepped(self, env_steps: int) -> None:
        """One env step of all rows is done. Raises `RolloutDropped` when it is of no use."""
        self._partial_env_steps += env_steps
        if self._drop:
            raise RolloutDropped("this rank takes the state of another")

    def complete(self, rollout: R) -> None:
        """Collected: ``rollout`` has all blocks. Raises `RolloutDropped` when it is of no use."""
        with self._changed:
            if self._drop:
                raise RolloutDropped("this rank takes the state of another")
            self._rollout, self._collecting, self._partial_env_steps = rollout, False, 0
            self._changed.notify_all()

    def abandon(self) -> None:
        """The main thread has stopped collecting."""
        with self._changed:
            self._blocks, self._cut, self._collecting = (), (), False
            self._changed.notify_all()

    def drop(self) -> int:
        """Throw away what is there, from the other thread; waits until the main thread has stopped
        collecting. Env steps dropped."""
        with self._changed:
            if self._collecting:
                self._drop = True
                self._changed.wait_for(lambda: not self._collecting)
            complete = 0 if self._rollout is None else self._rollout.env_steps
            dropped = complete + self._partial_env_steps
            self._was_dropped = self._was_dropped or self._rollout is not None
            self._forget()
            return dropped

    def take_dropped(self) -> bool:
        """Whether a complete rollout was dropped since this was last asked: its envs are past it."""
        with self._changed:
            dropped, self._was_dropped = self._was_dropped, False
            return dropped

    def use(self) -> None:
        """Its iteration is committed."""
        with self._changed:
            self._forget()

    def _forget(self) -> None:
        self._rollout, self._blocks, self._cut, self._partial_env_steps = None, (), (), 0
        self._drop = False
