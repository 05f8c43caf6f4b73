"""A deployed policy as a TorchScript file, and running one."""

import io
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from rallypoint.trainer.policies.policy import DeployedPolicy

METADATA: Final = "metadata.json"
"""Name of the extra file that holds the metadata, as one JSON object."""


def encode(policy: DeployedPolicy, metadata: Mapping[str, str]) -> bytes:
    """The file; ``torch.jit.load`` gives a function from ``[B, D]`` to ``[B, A]``, float32."""
    file = io.BytesIO()
    with _deprecated():
        traced = torch.jit.trace(  # type: ignore[no-untyped-call]
            policy, torch.zeros(2, policy.inputs)
        )
        torch.jit.save(traced, file, _extra_files={METADATA: json.dumps(dict(metadata))})
    return file.getvalue()


def runner(data: bytes) -> tuple[Callable[[Tensor], Tensor], dict[str, str]]:
    """What the file computes, and its metadata."""
    extra = {METADATA: ""}
    with _deprecated():
        loaded = torch.jit.load(  # type: ignore[no-untyped-call]
            io.BytesIO(data), map_location="cpu", _extra_files=extra
        )
    return loaded, json.loads(extra[METADATA])


@contextmanager
def _deprecated() -> Iterator[None]:
    """torch says at every call that TorchScript has a successor; the robots that read it have not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.jit", category=DeprecationWarning)
        yield
