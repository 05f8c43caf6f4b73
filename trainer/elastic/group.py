"""The process group of one generation: one small adapter around torch's group of the process.

Gloo cannot abort a collective: a peer that closed makes it raise at once, but a silent one blocks it
until its timeout. `ProcessGroup.release` ends it from another thread by shutting down the connected
sockets that the group opened; never a listening one, which would end the process.
"""

import contextlib
import datetime
import os
import socket
import sys
import threading
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store, _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from rallypoint.trainer.errors import GroupBroken

_PEER_LOSS_MARKS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Connection refused",
    "timed out",
    "Timed out",
)


def is_peer_loss(error: BaseException) -> bool:
    """Whether this exception of a collective says that a peer or its connection is gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _PEER_LOSS_MARKS)


class ProcessGroup:
    """The default process group of torch, formed anew for each generation."""

    def __init__(self, collective_s: float) -> None:
        self._collective_s = collective_s
        self._sockets: dict[int, str] = {}
        self._lock = threading.Lock()
        self._released = False

    def form(self, store: Store, *, rank: int, world_size: int, timeout_s: float) -> None:
        """Build the group. Raises `GroupBroken` when a member does not come within the timeout.

        The timeout is short while the group is being built (a peer lost meanwhile costs up to five
        times of it) and is raised afterwards.
        """
        before = _sockets()
        hook = sys.excepthook  # every init wraps it once more and never unwinds
        try:
            dist.init_process_group(
                "gloo",
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=timeout_s),
            )
        except (RuntimeError, ValueError) as error:
            self._destroy()
            raise GroupBroken(f"group of {world_size} ranks did not form: {error}") from error
        finally:
            sys.excepthook = hook
        with self._lock:
            self._released = False
            self._sockets = {f: s for f, s in _sockets().items() if before.get(f) != s}
        _set_pg_timeout(datetime.timedelta(seconds=self._collective_s), dist.group.WORLD)

    @property
    def released(self) -> bool:
        return self._released

    def release(self) -> int:
        """Make every collective of the group raise, from any thread. Number of sockets shut."""
        with self._lock:
            self._released = True
            return sum(_shut(fd, link) for fd, link in self._sockets.items())

    def close(self) -> None:
        """Leave the group; no member needs to agree."""
        with self._lock:
            self._sockets = {}
        self._destroy()

    def _destroy(self) -> None:
        if dist.is_initialized():
            # A broken group may complain on its way out; it is gone either way.
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()

    @contextlib.contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Turn a failed collective into `GroupBroken`; other errors pass unchanged."""
        if self._released:
            raise GroupBroken(f"{name}: the supervisor released this generation")
        try:
            yield
        except RuntimeError as error:
            if self._released or is_peer_loss(error):
                raise GroupBroken(f"{name}: {str(error).splitlines()[0]}") from error
            raise

    def all_gather(self, value: Tensor) -> list[Tensor]:
        out = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(out, value)
        return out

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        dist.all_reduce(value)
        return value

    def broadcast(self, value: Tensor, source: int) -> None:
        dist.broadcast(value, source)

    def wrap(self, module: nn.Module) -> nn.Module:
        """DDP without its constructor's broadcast, which would take rank 0 for the source."""
        with warnings.catch_warnings():
            # The option's successor does not exist on every torch that we support.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.*")
            return DistributedDataParallel(module, broadcast_buffers=False, init_sync=False)


def _sockets() -> dict[int, str]:
    """Sockets of this process, descriptor -> identity."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                found[int(name)] = link
    return found


def _shut(fd: int, identity: str) -> bool:
    """Shut a connected internet socket if the descriptor still is that socket."""
    try:
        if os.readlink(f"/proc/self/fd/{fd}") != identity:
            return False
        with socket.socket(fileno=os.dup(fd)) as copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            copy.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False  # closed, or already shut, in the meantime: what we wanted
    return True
