"""The process group of one generation: one small adapter around torch's group of the process.

Gloo cannot abort a collective: a peer that closed makes it raise at once, but a silent one blocks it
until its timeout. `ProcessGroup.release` ends it from another thread by shutting down the connected
sockets that the group opened; never a listening one, which would end the process.

Gloo at times loses either signal: every connection is closed, and still an operation in its own thread
waits for its timeout (seen in one of three releases of a stopped peer on a busy machine). So nobody
waits inside gloo: operations run in gloo's thread, gradients included (DDP's hook), and whoever needs
one waits for its end or the release. A group with an operation that is stuck is put aside until that has
timed out, since the end of the group would wait for it.

On GPUs gradients go through NCCL, which never raises in useful time: its communicators are aborted, in
a thread with a deadline, past which the process has to end (``on_stuck``). Small control collectives on
CPU tensors stay with gloo there too.
"""

import contextlib
import datetime
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, _unregister_all_process_groups
from torch.distributed.distributed_c10d import Store, _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from rallypoint.daemon.shared.timeouts import Timeouts
from rallypoint.trainer.elastic.meter import Meter
from rallypoint.trainer.elastic.sockets import open_sockets, shut
from rallypoint.trainer.errors import GroupBroken, RestartCold, TrainerError

T = TypeVar("T")

_POLL_S = (20e-6, 1e-3)
"""Shortest and longest sleep between two looks at an operation that has not ended."""

_PEER_LOSS_MARKS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Connection refused",
    "timed out",
    "Timed out",
    "pair closure",  # another operation on the same connection timed out before
)


def is_peer_loss(error: BaseException) -> bool:
    """Whether this exception of a collective says that a peer or its connection is gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _PEER_LOSS_MARKS)


def _is_device_fault(error: RuntimeError) -> bool:
    """Whether the CUDA context of this process is lost: only a new process can use the GPU again."""
    return "CUDA error" in str(error) and "out of memory" not in str(error)


class ProcessGroup:
    """The default process group of torch, formed anew for each generation."""

    def __init__(
        self,
        timeouts: Timeouts,
        device: torch.device,
        on_stuck: Callable[[str], None],
        collective: Callable[[], AbstractContextManager[None]] = nullcontext,
        capturing: Callable[[], bool] | None = None,
    ) -> None:
        """``on_stuck(why)`` must end the process: something cannot be ended from inside it.
        ``collective()`` is entered while this rank waits in one. ``capturing()`` says whether a CUDA
        graph is being captured; None: asked of torch where the device is a GPU."""
        self.meter = Meter()
        self._timeouts = timeouts
        self._collective = collective
        self._device = device
        self._on_stuck = on_stuck
        if capturing is None and device.type == "cuda":
            capturing = torch.cuda.is_current_stream_capturing
        self._capturing = capturing
        self._aborting: threading.Thread | None = None
        if device.type == "cuda":
            _configure_nccl(timeouts)
        self._sockets: dict[int, str] = {}
        self._lock = threading.Lock()
        self._released = False
        self._generation = 0
        self._pending: list[dist.Work] = []
        """Operations that have begun and whose end nobody has seen."""
        self._inside: object | None = None
        """Changes each time a guarded section is entered or left."""
        self._stuck: list[tuple[object, dist.Work]] = []

    def form(
        self, store: Store, *, generation: int, rank: int, world_size: int, timeout_s: float
    ) -> None:
        """Build the group. Raises `GroupBroken` when a member does not come within the timeout.

        The timeout is short while the group is being built (a peer lost meanwhile costs up to five
        times of it) and is raised afterwards.
        """
        with self._lock:
            self._generation = generation
        # Torch names a group by a count of its own, does not take a failed try back, and looks for its
        # peers under that name: members that failed a different number of times would never meet again.
        c10d._world.group_count = 0
        before = open_sockets()
        hook = sys.excepthook  # every init wraps it once more and never unwinds
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self._on_gpu else "gloo",
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=timeout_s),
                device_id=self._device if self._on_gpu else None,
            )
        except (RuntimeError, ValueError) as error:
            self.close()
            raise GroupBroken(f"group of {world_size} ranks did not form: {error}") from error
        finally:
            sys.excepthook = hook
        with self._lock:
            self._released = False
            self._aborting = None
            self._sockets = {f: s for f, s in open_sockets().items() if before.get(f) != s}
        _set_pg_timeout(datetime.timedelta(seconds=self._timeouts.collective_s), dist.group.WORLD)

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @property
    def released(self) -> bool:
        return self._released

    def release(self, *, before: int) -> int:
        """Make every collective of the group raise, from any thread, if it is that of a generation
        before this one. Number of sockets shut. The group of one of a warm-up waits for nobody."""
        with self._lock:
            if not 0 < self._generation < before:
                return 0
            self._released = True
            if self._inside is not None:
                self._expect_out(self._inside)
            if self._on_gpu:
                self._begin_abort()
            return sum(shut(fd, link) for fd, link in self._sockets.items())

    def close(self) -> None:
        """Leave the group; no member needs to agree."""
        with self._lock:
            self._sockets = {}
            if self._on_gpu:
                self._begin_abort()  # NCCL's own end would wait for peers that may be gone
                self._aborting = None
        self._destroy()

    def _expect_out(self, inside: object) -> None:
        """End the process if it is still inside the same collective when the bound is over."""
        bound_s = self._timeouts.abort_s

        def check() -> None:
            if self._inside is inside:
                self._on_stuck(f"a released collective did not end within {bound_s} s")

        timer = threading.Timer(bound_s, check)
        timer.daemon = True
        timer.start()

    def _begin_abort(self) -> None:
        """Abort NCCL's communicators, in a thread: whoever waits in them comes free in milliseconds,
        the rest of it takes half a second, beside the building of the next group. The caller holds
        the lock."""
        if self._aborting is not None or not dist.is_initialized():
            return
        group = _require(dist.group.WORLD)  # kept by the thread: its end must not come earlier
        overdue = threading.Timer(
            self._timeouts.abort_s,
            self._on_stuck,
            (f"NCCL's abort did not end within {self._timeouts.abort_s} s",),
        )
        overdue.daemon = True

        def abort() -> None:
            group._get_backend(self._device).abort()
            overdue.cancel()

        overdue.start()
        self._aborting = threading.Thread(target=abort, name="nccl-abort", daemon=True)
        self._aborting.start()

    def _destroy(self) -> None:
        if not dist.is_initialized():
            return
        stuck = [work for work in self._pending if not work.is_completed()]
        self._stuck += [(dist.group.WORLD, work) for work in stuck]
        self._pending = []
        if self._on_gpu:
            _forget_groups()
        else:
            # A broken group may complain on its way out; it is gone either way.
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        self._stuck = [(group, work) for group, work in self._stuck if not work.is_completed()]

    def _begun(self, work: dist.Work | None, value: Tensor) -> dist.Work:
        begun = _require(work)
        if value.device.type == "cpu":
            self._pending.append(begun)
        return begun

    def _wait(self, work: dist.Work, value: Tensor) -> None:
        """Wait until an operation has ended or the group is released, whichever comes first."""
        with self._collective():
            if value.device.type == "cpu":
                self._wait_for_end(work)
            else:
                work.wait()  # only the stream waits
                self._wait_for_stream()

    def wait_for_gradients(self) -> None:
        """On a GPU DDP only puts its reductions into the stream. They are waited for here, as the last
        of them is a collective like any other: all can then see who waits in it."""
        if self._on_gpu:
            with self._collective():
                self._wait_for_stream()

    def _wait_for_stream(self) -> None:
        """Whoever needs the result next would wait for the stream anyway; the abort ends it."""
        torch.cuda.current_stream(self._device).synchronize()

    def _wait_for_end(self, work: dist.Work) -> None:
        """Looks, rather than being told: to be woken through gloo's thread costs a second switch of
        threads, which on busy cores is as long as the collective itself."""
        began_s = time.monotonic()
        while not work.is_completed():
            if self._released:
                raise GroupBroken("the supervisor released this generation")
            waited_s = time.monotonic() - began_s
            time.sleep(min(max(waited_s / 8, _POLL_S[0]), _POLL_S[1]))
        self._pending.remove(work)
        work.wait()  # at its end: only says how it ended

    @contextlib.contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Turn a failed collective into `GroupBroken`; other errors pass unchanged."""
        if self._released:
            raise GroupBroken(f"{name}: the supervisor released this generation")
        outer, self._inside = self._inside, object()
        try:
            yield
        except RuntimeError as error:
            if _is_device_fault(error):
                raise RestartCold(f"{name}: {str(error).splitlines()[0]}") from error
            if self._released or is_peer_loss(error):
                raise GroupBroken(f"{name}: {str(error).splitlines()[0]}") from error
            raise
        finally:
            self._inside = outer

    def _refuse_capture(self, name: str) -> None:
        """A replayed graph would run the collective on the communicator that it was captured with,
        which is aborted at the next change of membership."""
        if self._capturing is not None and self._capturing():
            raise TrainerError(
                f"collective {name!r} while a CUDA graph is being captured; capture what lies between "
                "collectives, never one of them"
            )

    def all_gather(self, name: str, value: Tensor) -> list[Tensor]:
        self._refuse_capture(name)
        out = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        with self.meter.collective(name, value):
            self._wait(self._begun(dist.all_gather(out, value, async_op=True), value), value)
        return out

    def all_reduce_sum(self, name: str, value: Tensor) -> Tensor:
        return self.begin_sum(name, value)()

    def begin_sum(self, name: str, value: Tensor) -> Callable[[], Tensor]:
        """Begin a sum in place; the call waits for its end, which alone is measured."""
        self._refuse_capture(name)
        work = self._begun(dist.all_reduce(value, async_op=True), value)

        def wait() -> Tensor:
            with self.meter.collective(name, value):
                self._wait(work, value)
            return value

        return wait

    def broadcast(self, name: str, value: Tensor, source: int) -> None:
        """The value of rank ``source``, in place on all."""
        self._refuse_capture(name)
        with self.meter.collective(name, value):
            self._wait(self._begun(dist.broadcast(value, source, async_op=True), value), value)

    def wrap(self, module: nn.Module) -> nn.Module:
        """DDP without its constructor's broadcast, which would take rank 0 for the source."""
        with warnings.catch_warnings():
            # The option's successor does not exist on every torch that we support.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.*")
            wrapped = DistributedDataParallel(
                module,
                device_ids=[self._device] if self._on_gpu else None,
                broadcast_buffers=False,
                init_sync=False,
                gradient_as_bucket_view=True,
            )
        if not self._on_gpu:
            wrapped.register_comm_hook(None, self._reduce_gradients)
        if self._capturing is not None:
            # DDP starts its own reductions in backward; a capture of that holds the forward pass too.
            wrapped.register_forward_pre_hook(lambda *_: self._refuse_capture("gradients"))
        return wrapped

    @staticmethod
    def unwrap(module: nn.Module) -> None:
        """Take DDP's hooks off the parameters. Its reducer may outlive a backward that was broken off,
        and would then take part in those of the next generation."""
        if isinstance(module, DistributedDataParallel):
            module._remove_autograd_hooks()  # type: ignore[no-untyped-call]

    def _reduce_gradients(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket over ranks, as DDP would, but in a wait that can be ended."""
        gradients = bucket.buffer().div_(dist.get_world_size())
        self.all_reduce_sum("gradients", gradients)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(gradients)
        return done


def _require(value: T | None) -> T:
    if value is None:
        raise RuntimeError("this process is in no group: a programming error")
    return value


def _forget_groups() -> None:
    """What torch does after it has aborted all groups, without waiting for the abort."""
    c10d._update_default_pg(None)
    world = c10d._world
    for registry in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ):
        registry.clear()
    _unregister_all_process_groups()
    world.group_count = 0


def _configure_nccl(timeouts: Timeouts) -> None:
    """NCCL's watchdogs must never end a survivor; loss is ours to notice. Set before the first group."""
    os.environ.update(
        TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
        TORCH_NCCL_ENABLE_MONITORING="0",
        TORCH_NCCL_DUMP_ON_TIMEOUT="0",
        TORCH_NCCL_PROPAGATE_ERROR="0",
        TORCH_NCCL_RETHROW_CUDA_ERRORS="0",
        # All connections are made while the group is built, where a lost peer is expected, and not
        # by its first collectives, where waiting for one would outlast the abort.
        NCCL_RUNTIME_CONNECT="0",
        # A member that dies while communicators are built must not block the others for ever.
        TORCH_NCCL_USE_COMM_NONBLOCKING="1",
        TORCH_NCCL_NONBLOCKING_TIMEOUT=str(max(1, round(timeouts.nccl_init_s))),
    )
