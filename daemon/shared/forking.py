"""Messages between a supervisor and the fork server of its node: datagrams of JSON on a socket pair.

The worker's output file travels with `ForkWorker` as a descriptor.
"""

import msgspec

from rallypoint.daemon.shared.plan import WorkerKey

MAX_BYTES = 65536


class _Message(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower):
    pass


class ForkWorker(_Message, frozen=True):
    """Supervisor: fork a worker with these arguments."""

    key: WorkerKey
    arguments: tuple[str, ...]


class Warm(_Message, frozen=True):
    """Server: everything is imported."""

    threads: int
    """Of the server; with more than one no fork is sound."""


class Forked(_Message, frozen=True):
    """Server: the worker runs."""

    key: WorkerKey
    pid: int
    start_ticks: int


class ForkFailed(_Message, frozen=True):
    """Server: it could not be forked."""

    key: WorkerKey
    error: str


class ForkEnded(_Message, frozen=True):
    """Server: a worker has ended, its group is swept and it is reaped."""

    pid: int
    status: int
    """Exit code, or the negative number of the signal."""


ServerMessage = Warm | Forked | ForkFailed | ForkEnded

_from_server = msgspec.json.Decoder(ServerMessage)
_from_supervisor = msgspec.json.Decoder(ForkWorker)


def encode(message: ForkWorker | ServerMessage) -> bytes:
    """One datagram."""
    return msgspec.json.encode(message)


def decode_from_server(data: bytes) -> ServerMessage:
    """What the server says. Raises msgspec.MsgspecError."""
    return _from_server.decode(data)


def decode_from_supervisor(data: bytes) -> ForkWorker:
    """What the supervisor asks for. Raises msgspec.MsgspecError."""
    return _from_supervisor.decode(data)
