"""``rallypoint run`` with real workers, one of which prints without end."""

import sys
from pathlib import Path

from tests.fakes import supervise_fakes

supervise_fakes.FAKE = Path(supervise_fakes.__file__).with_name("noisy_worker.py")
sys.exit(supervise_fakes.main())
