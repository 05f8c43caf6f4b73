"""Errors of checkpointing."""

from rallypoint.daemon.shared.errors import ConfigError, RallypointError


class CheckpointError(RallypointError):
    """A checkpoint could not be written, read or removed. Training never stops because of it."""


class UnsupportedUrl(CheckpointError, ConfigError):
    """This version cannot keep checkpoints at that URL. Exit code 2, nothing was touched."""


class NonFiniteState(CheckpointError):
    """A tensor holds NaN or infinity: such state is never written."""


class CommitRefused(CheckpointError):
    """The supervisor did not allow the manifest (fenced off, or no answer): nothing is visible."""


class DamagedCheckpoint(CheckpointError):
    """A committed checkpoint does not verify: the message names the file and what differs."""


class NoContainer(OSError):
    """The bucket or container of a URL does not exist; to storage it is an error like any other."""
