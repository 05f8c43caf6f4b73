"""What an etcd error means: status codes and texts become the errors of `rallypoint.daemon.errors`."""

from typing import Final

import grpc

from rallypoint.daemon.errors import (
    LeaseExpiredError,
    StoreError,
    StorePermissionError,
    StoreQuotaError,
    StoreUnavailableError,
)

_DENIED: Final = (
    "authentication failed",  # wrong user or password
    "user name is empty",  # auth is on, and no token was sent
    "user name not found",
    "authentication is not enabled",
)
_NO_ANSWER: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,  # also "no leader", "leader changed", "request timed out"
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,  # a broken HTTP/2 stream
        grpc.StatusCode.UNKNOWN,  # a server that stops: "raft proposal dropped", "context canceled"
        grpc.StatusCode.ABORTED,
    }
)


def renews_token(error: grpc.aio.AioRpcError) -> bool:
    """Whether the token was refused: idle for longer than the server's ``--auth-token-ttl``, or older
    than a change of users or roles."""
    return error.code() == grpc.StatusCode.UNAUTHENTICATED or (
        "revision of auth store is old" in (error.details() or "")
    )


def of(error: grpc.aio.AioRpcError, method: str, endpoint: str) -> StoreError:
    """The error of our tree for the failure of ``method`` at ``endpoint``."""
    code, details = error.code(), error.details() or ""
    where = f"etcd {method} at {endpoint}: {code.name}: {details}"
    if "lease not found" in details:
        return LeaseExpiredError(f"{where}: it expired or was revoked; grant a new one")
    if "database space exceeded" in details:
        return StoreQuotaError(
            f"{where}: the server's --quota-backend-bytes is reached; compact, defragment, then "
            "`etcdctl alarm disarm`. Leases that run go on; nothing can be written or granted"
        )
    if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED) or any(
        text in details for text in _DENIED
    ):
        return StorePermissionError(
            f"{where}: check membership.user, password_file or the client certificate, and that the "
            "role may read and write /rallypoint/"
        )
    if code in _NO_ANSWER or "too many requests" in details or "not leader" in details:
        return StoreUnavailableError(where)
    return StoreError(f"{where}: the request cannot be served as it stands")
