"""Errors of what is done with a policy."""

from rallypoint.trainer.errors import TrainerError


class MissingExtra(TrainerError):
    """A package is needed that the default installation leaves out."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"this needs the package {package}, which is not installed: "
            f"pip install 'rallypoint[{extra}]'"
        )


class ExportError(TrainerError):
    """A policy was not exported; no file was written."""


class OutputError(TrainerError):
    """A result could not be written where it was asked for."""
