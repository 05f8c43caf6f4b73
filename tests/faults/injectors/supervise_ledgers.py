"""``rallypoint run`` with workers that keep ledgers: the same supervisor, the same workers, and books."""

import sys
from pathlib import Path

from rallypoint.daemon.executors.forkserver import ForkServer
from tests.fakes import supervise_fakes

ForkServer.program = (str(Path(supervise_fakes.__file__).with_name("ledger_worker.py")),)
sys.exit(supervise_fakes.main())
