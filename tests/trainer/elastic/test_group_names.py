"""A group that did not form leaves no trace in the name under which its members look for each other."""

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.timeouts import derive
from rallypoint.trainer.elastic.group import ProcessGroup
from rallypoint.trainer.errors import GroupBroken


def _stuck(why: str) -> None:
    raise AssertionError(why)


@pytest.mark.slow
def test_who_failed_to_form_meets_the_others_under_the_same_name() -> None:
    group = ProcessGroup(derive(Config()), torch.device("cpu"), _stuck)
    names = []
    for absent in (0, 2, 0):  # peers that do not come
        for _ in range(absent):
            with pytest.raises(GroupBroken, match="group of 2 ranks did not form"):
                group.form(HashStore(), generation=1, rank=0, world_size=2, timeout_s=0.1)
        group.form(HashStore(), generation=2, rank=0, world_size=1, timeout_s=5.0)
        world = dist.group.WORLD
        assert world is not None
        names.append(world.group_name)
        group.close()
    assert len(set(names)) == 1, names
