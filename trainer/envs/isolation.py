"""Two worlds of global random state: the simulator's and everybody else's.

Simulators reseed and draw from the process-wide generators of torch, numpy and Python, and switch
cuDNN's autotuner. Inside `OwnRandomness.entered` they see state of their own, which goes on from call to
call; outside of it nothing shows that they were there.
"""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class _State:
    torch_cpu: Tensor
    torch_device: Tensor | None
    numpy: Any
    python: Any
    autotune: bool


class OwnRandomness:
    """The global random state of one simulator. One thread at a time may be inside of any of them."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._own: _State | None = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Swap the two worlds, and swap them back. The first time the own one is seeded."""
        others = self._read()
        if self._own is None:
            self._begin()
        else:
            self._write(self._own)
        try:
            yield
        finally:
            self._own = self._read()
            self._write(others)

    def _begin(self) -> None:
        torch.manual_seed(self._seed)
        np.random.seed(self._seed % 2**32)
        random.seed(self._seed)

    def _read(self) -> _State:
        cuda = self._device.type == "cuda"
        return _State(
            torch.get_rng_state(),
            torch.cuda.get_rng_state(self._device) if cuda else None,
            np.random.get_state(),
            random.getstate(),
            torch.backends.cudnn.benchmark,
        )

    def _write(self, state: _State) -> None:
        torch.set_rng_state(state.torch_cpu)
        if state.torch_device is not None:
            torch.cuda.set_rng_state(state.torch_device, self._device)
        np.random.set_state(state.numpy)
        random.setstate(state.python)
        torch.backends.cudnn.benchmark = state.autotune
