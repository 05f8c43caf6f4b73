"""Collectives of a GPU, through fakes of the stream: never captured in a CUDA graph; whoever waits in
one is seen to be inside."""

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.slotpage import SlotPage
from rallypoint.daemon.shared.timeouts import derive
from rallypoint.trainer.elastic.group import ProcessGroup
from rallypoint.trainer.elastic.presence import Presence
from rallypoint.trainer.errors import TrainerError


class Capture:
    """Stands for the state of the CUDA stream."""

    active = False

    def __call__(self) -> bool:
        return self.active


def no_end(why: str) -> None:
    raise AssertionError(why)


@pytest.fixture(name="capture")
def a_capture() -> Capture:
    return Capture()


@pytest.fixture(name="group")
def group_of_one(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessGroup]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    group = ProcessGroup(derive(Config()), torch.device("cpu"), no_end, capturing=capture)
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=10))
    group.form(store, generation=1, rank=0, world_size=1, timeout_s=10)
    yield group
    group.close()


@pytest.mark.parametrize(
    "collective",
    [
        pytest.param(lambda g, x: g.all_gather("last", x), id="all-gather"),
        pytest.param(lambda g, x: g.all_reduce_sum("barrier", x), id="sum"),
        pytest.param(lambda g, x: g.broadcast("broadcast", x, 0), id="broadcast"),
    ],
)
def test_a_collective_in_a_capture_is_refused_before_it_starts(
    group: ProcessGroup,
    capture: Capture,
    collective: Callable[[ProcessGroup, torch.Tensor], object],
) -> None:
    value = torch.ones(2)
    collective(group, value)
    capture.active = True
    with pytest.raises(TrainerError, match="while a CUDA graph is being captured"):
        collective(group, value)
    assert value.tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_so_are_the_gradients_of_ddp(group: ProcessGroup, capture: Capture) -> None:
    wrapped = group.wrap(nn.Linear(2, 1))
    wrapped(torch.ones(3, 2)).sum().backward()
    capture.active = True
    with pytest.raises(TrainerError, match="'gradients' while"):
        wrapped(torch.ones(3, 2))
    group.unwrap(wrapped)


def test_on_a_gpu_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with patch.dict(os.environ):  # NCCL's settings are taken back
        group = ProcessGroup(derive(Config()), torch.device("cuda", 0), no_end)
    with pytest.raises(TrainerError, match="'barrier' while"):
        group.all_reduce_sum("barrier", torch.ones(()))


class Stream:
    """Stands for the CUDA stream: looks at the page while somebody waits for it."""

    def __init__(self, page: SlotPage) -> None:
        self.page = page
        self.seen: list[tuple[int, bool]] = []
        """(collectives entered, inside) during each wait."""

    def synchronize(self) -> None:
        counters = self.page.read()
        self.seen.append((counters.collective, counters.inside))


class Work:
    """An operation of NCCL: to wait for it is to let the stream wait."""

    def wait(self) -> None:
        return None


def test_who_waits_for_a_collective_of_the_gpu_is_inside_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the supervisor can tell that all wait, in NCCL as in gloo (DESIGN 4.9)."""
    page = SlotPage(tmp_path / "0.page", create=True)
    presence, stream = Presence(page), Stream(page)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: Work())
    with patch.dict(os.environ):
        group = ProcessGroup(
            derive(Config()),
            torch.device("cuda", 0),
            no_end,
            presence.collective,
            capturing=lambda: False,
        )
    presence.join(3)
    group.all_reduce_sum("mini_batch", torch.empty(3, device="meta"))
    group.wait_for_gradients()
    assert stream.seen == [(1, True), (2, True)]
    assert (page.read().collective, page.read().inside) == (2, False)
    page.close()
