"""Errors of the trainer."""

from rallypoint.daemon.shared.errors import RallypointError


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the host or of the device has run out: this worker crashes, as it would have
    at the hands of the kernel. Another process on the machine may be to blame, so it proves nothing
    about the program."""
    from torch import OutOfMemoryError  # here: the errors and the protocol load without torch

    if isinstance(error, MemoryError | OutOfMemoryError):
        return True
    said = str(error) if isinstance(error, RuntimeError) else ""
    return "can't allocate memory" in said or said.startswith("Failed to allocate ")  # torch, Warp


class TrainerError(RallypointError):
    """Base of what a worker raises on its own account."""


class GroupBroken(TrainerError):
    """A collective of this generation cannot end: a peer is gone, or the supervisor released us.

    Retryable: the session rebuilds the group and goes on."""


class Superseded(TrainerError):
    """A newer plan was seen while this generation was being formed. Retryable."""


class StateMismatch(TrainerError):
    """State hashes of ranks differ where they must agree."""


class CheckpointMismatch(TrainerError):
    """A checkpoint does not fit this job; the message says what differs."""


class EnvError(TrainerError):
    """An env broke its contract, or a task does not exist."""


class EnvCapacityError(EnvError):
    """More envs were asked for than this process can hold; `capacity_envs` says how many it can."""

    def __init__(self, message: str, capacity_envs: int) -> None:
        super().__init__(message)
        self.capacity_envs = capacity_envs


class Left(TrainerError):
    """This worker leaves by agreement; the message is the reason given to the supervisor."""


class RolloutDropped(TrainerError):
    """The rollout in flight is of no use any more: this rank takes another state. Retryable."""


class RestartCold(TrainerError):
    """This process must not go on with what it holds; a fresh one takes its slot."""
