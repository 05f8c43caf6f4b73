"""Root of the error tree, and the errors of what the daemon and the trainer share."""


class RallypointError(Exception):
    """Anything rallypoint reports to a person. The message says what, where, the value and the remedy."""


class ConfigError(RallypointError):
    """The configuration cannot be used as it stands; nothing was started or touched. Exit code 2."""


class BudgetError(ConfigError, ValueError):
    """Env counts, blocks, mini-batches and world size do not divide; the message names the values."""


class ProtocolError(RallypointError):
    """A peer on a control or admin socket sent something this version cannot take."""
