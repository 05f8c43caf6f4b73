"""``rallypoint run`` with real workers, one of which prints without end."""

import sys
from pathlib import Path

from rallypoint.daemon.executors.forkserver import ForkServer
from tests.fakes import supervise_fakes

ForkServer.program = (str(Path(supervise_fakes.__file__).with_name("noisy_worker.py")),)
sys.exit(supervise_fakes.main())
