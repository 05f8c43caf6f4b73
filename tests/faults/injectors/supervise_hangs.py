"""``rallypoint run`` with workers that keep ledgers, one of which hangs as ``HANG`` says."""

import sys
from pathlib import Path

from rallypoint.daemon.executors.forkserver import ForkServer
from tests.fakes import supervise_fakes

ForkServer.program = (str(Path(supervise_fakes.__file__).with_name("hanging_worker.py")),)
sys.exit(supervise_fakes.main())
