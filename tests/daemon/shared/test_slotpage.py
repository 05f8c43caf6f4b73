"""Counters that outlive the process that writes them."""

import os
import signal
import sys
from pathlib import Path
from subprocess import Popen

from rallypoint.daemon.shared.activity import BUCKETS
from rallypoint.daemon.shared.slotpage import PHASES, SlotPage

WRITER = """
import os, signal, sys
from pathlib import Path
from rallypoint.daemon.shared.slotpage import PHASES, SlotPage
page = SlotPage(Path(sys.argv[1]))
page.put(incarnation=3, phase=PHASES.index("update"), inside=1)
page.add("collected_env_steps", 40)
page.add("collected_env_steps", 2)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_worker_wrote_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "slots" / "0.page"
    page = SlotPage(path, create=True)
    with Popen([sys.executable, "-c", WRITER, str(path)]) as writer:
        assert writer.wait(60) == -signal.SIGKILL
    counters = page.read()
    assert (counters.incarnation, counters.phase, counters.inside) == (3, "update", True)
    assert counters.collected_env_steps == 42
    page.close()


def test_each_life_starts_with_a_cleared_page(tmp_path: Path) -> None:
    path = tmp_path / "0.page"
    first = SlotPage(path, create=True)
    first.put(iteration=5)
    second = SlotPage(path, create=True)
    assert second.read().iteration == 0
    assert second.read().phase == PHASES[0]
    assert os.path.getsize(path) == 8 * (12 + len(BUCKETS))
    first.close()
    second.close()
