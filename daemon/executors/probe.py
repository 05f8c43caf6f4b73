"""Asking the own port of a worker, or of a supervisor, whether its process lives.

Refused while the host answers means gone; an accepted connection means that the process (or at
least its kernel socket) is there; nothing at all within the bound means silent.

The kernels do the talking, so a probe of a thousand costs little more than the calls to ours, in a
thread: on the event loop the callbacks of many connections would take longer than the bound, and make
workers silent that have long answered.
"""

import asyncio
import contextlib
import errno
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from rallypoint.daemon.core.events import ProbeAnswered
from rallypoint.daemon.shared.plan import WorkerKey

Answer = Literal["answering", "gone", "silent"]

Address = tuple[str, int]

AT_ONCE: Final = 256
"""Sockets open at a time: many systems allow a process no more than 1,024 descriptors."""


async def probe(
    number: int, targets: Mapping[WorkerKey, Address | None], bound_s: float
) -> ProbeAnswered:
    """Probe all targets, each within ``bound_s`` seconds, up to `AT_ONCE` at once. ``None`` for an
    address marks a worker of this node that the process table knows to be gone."""
    plain = [a for a in targets.values() if a is not None and _is_numeric(a[0])]
    answers: dict[Address | None, Answer] = {None: "gone"}
    for begin in range(0, len(plain), AT_ONCE):
        group = plain[begin : begin + AT_ONCE]
        found = await asyncio.to_thread(_ask_numeric, group, bound_s)
        answers |= zip(group, found, strict=True)
    named = [a for a in targets.values() if a not in answers]
    found = await asyncio.gather(*(ask(address, bound_s) for address in named))
    answers |= zip(named, found, strict=True)
    by_answer: dict[Answer, list[WorkerKey]] = {"answering": [], "gone": [], "silent": []}
    for key, address in targets.items():
        by_answer[answers[address]].append(key)
    return ProbeAnswered(
        probe=number,
        answering=tuple(by_answer["answering"]),
        gone=tuple(by_answer["gone"]),
        silent=tuple(by_answer["silent"]),
    )


async def ask(address: Address | None, bound_s: float) -> Answer:
    """Whether somebody listens at an address, which may be a name; None is one that is known to be
    gone."""
    if address is None:
        return "gone"
    try:
        async with asyncio.timeout(bound_s):
            _, writer = await asyncio.open_connection(*address)
    except ConnectionRefusedError:
        return "gone"
    except OSError:  # TimeoutError is one: no route, no answer, or no such host
        return "silent"
    writer.close()
    with contextlib.suppress(OSError):  # the worker may close first; it did answer
        await writer.wait_closed()
    return "answering"


def _is_numeric(host: str) -> bool:
    """Whether no name has to be looked up."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, host)
            return True
    return False


def _ask_numeric(addresses: Sequence[Address], bound_s: float) -> list[Answer]:
    """What `ask` says of each, all at once."""
    answers: list[Answer] = ["silent"] * len(addresses)
    poller, waiting = select.poll(), dict[int, tuple[int, socket.socket]]()
    deadline_s = time.monotonic() + bound_s
    try:
        for index, address in enumerate(addresses):
            one = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
            one.setblocking(False)
            code = one.connect_ex(address)
            if code == errno.EINPROGRESS:
                waiting[one.fileno()] = index, one
                poller.register(one, select.POLLOUT)
            else:
                answers[index] = _meaning(code)
                one.close()
        while waiting:
            left_s = deadline_s - time.monotonic()
            events = poller.poll(max(0.0, left_s) * 1000)
            for descriptor, _ in events:
                index, one = waiting.pop(descriptor)
                poller.unregister(descriptor)
                answers[index] = _meaning(one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
                one.close()
            if left_s <= 0 and not events:
                break  # asked once more after the deadline: what had come by then counts
    finally:
        for _, one in waiting.values():
            one.close()
    return answers


def _meaning(code: int) -> Answer:
    """What the outcome of a connection says; no route is no answer."""
    if code == 0:
        return "answering"
    return "gone" if code == errno.ECONNREFUSED else "silent"
