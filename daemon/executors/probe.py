"""Asking the own port of a worker, or of a supervisor, whether its process lives.

Refused while the host answers means gone; an accepted connection means that the process (or at
least its kernel socket) is there; nothing at all within the bound means silent.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Literal

from rallypoint.daemon.core.events import ProbeAnswered
from rallypoint.daemon.shared.plan import WorkerKey

Answer = Literal["answering", "gone", "silent"]


async def probe(
    number: int, targets: Mapping[WorkerKey, tuple[str, int] | None], bound_s: float
) -> ProbeAnswered:
    """Probe all targets at once, within ``bound_s`` seconds. ``None`` for an address marks a
    worker of this node that the process table knows to be gone."""
    answers = await asyncio.gather(*(ask(address, bound_s) for address in targets.values()))
    by_answer: dict[Answer, list[WorkerKey]] = {"answering": [], "gone": [], "silent": []}
    for key, answer in zip(targets, answers, strict=True):
        by_answer[answer].append(key)
    return ProbeAnswered(
        probe=number,
        answering=tuple(by_answer["answering"]),
        gone=tuple(by_answer["gone"]),
        silent=tuple(by_answer["silent"]),
    )


async def ask(address: tuple[str, int] | None, bound_s: float) -> Answer:
    """Whether somebody listens at an address; None is one that is known to be gone."""
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
