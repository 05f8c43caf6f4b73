"""``rallypoint run`` where the client library of Weights & Biases is the stand-in beside this file."""

import os
import sys
from pathlib import Path

from rallypoint.daemon.cli import main

STAND_IN = str(Path(__file__).with_name("wandbfake"))

if __name__ == "__main__":
    sys.path.insert(0, STAND_IN)
    os.environ["PYTHONPATH"] += os.pathsep + STAND_IN  # of the feed, a process of its own
    sys.exit(main(["run", *sys.argv[1:]]))
