"""``rallypoint run`` with workers that keep ledgers: the same supervisor, the same workers, and books."""

import sys
from pathlib import Path

from tests.fakes import supervise_fakes

supervise_fakes.FAKE = Path(supervise_fakes.__file__).with_name("ledger_worker.py")
sys.exit(supervise_fakes.main())
