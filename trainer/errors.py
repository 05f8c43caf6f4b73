"""Errors of the trainer."""

from rallypoint.daemon.shared.errors import RallypointError


class TrainerError(RallypointError):
    """Base of what a worker raises on its own account."""


class GroupBroken(TrainerError):
    """A collective of this generation cannot end: a peer is gone, or the supervisor released us.

    Retryable: the session rebuilds the group and goes on."""


class Superseded(TrainerError):
    """A newer plan was seen while this generation was being formed. Retryable."""


class StateMismatch(TrainerError):
    """State hashes of ranks differ where they must agree."""


class EnvError(TrainerError):
    """An env broke its contract, or a task does not exist."""


class Left(TrainerError):
    """This worker leaves by agreement; the message is the reason given to the supervisor."""


class RolloutDropped(TrainerError):
    """The rollout in flight is of no use any more: this rank takes another state. Retryable."""


class RestartCold(TrainerError):
    """This process must not go on with what it holds; a fresh one takes its slot."""
