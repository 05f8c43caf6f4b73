"""What torchrun starts in a test: workers that reduce without end, until a file says stop.

Usage: SCRIPT FOLDER. Each worker appends "pid agent world rank" for each reduction that it is through.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    agent, world, rank = os.getppid(), dist.get_world_size(), dist.get_rank()
    with (folder / f"worker-{os.getpid()}").open("w") as log:
        stop = False
        while not stop:
            flag = torch.tensor([float((folder / "stop").exists())])
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            stop = bool(flag.item())
            print(os.getpid(), agent, world, rank, file=log, flush=True)
            time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
