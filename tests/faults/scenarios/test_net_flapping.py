"""A node whose cable goes out and in again every five seconds."""

import json
import time
from pathlib import Path

import pytest

from tests.fakes.supervised import Status
from tests.faults.injectors.drills import Drill, drilled

pytestmark = [pytest.mark.slow, pytest.mark.faults]

AFTER = 3
PERIOD_S = 5.0


def test_a_node_that_flaps_is_quarantined_seen_and_cleared(tmp_path: Path) -> None:
    with (
        drilled(tmp_path, "--set", f"membership.quarantine_after={AFTER}") as job,
        Drill(job) as drill,
    ):
        victim = job.follower()
        rest = drill.rest(victim)
        node = job[victim]
        for flap in range(AFTER):
            began_s = time.monotonic()
            drill.cut(victim)
            drill.survived(*rest, cause="node_lost")
            job.network.heal(victim)
            if flap < AFTER - 1:
                drill.whole(victim)
                time.sleep(max(0.0, began_s + PERIOD_S - time.monotonic()))
        said = node.wait_logged("node_quarantined")
        assert said["reason"].startswith(f"{AFTER} plans in a row left out its workers")

        def kept_out(status: Status) -> bool:
            return [w["state"] for w in status["workers"] if w["node"] == victim] == ["quarantined"]

        for one in job.running.values():
            one.wait_for(kept_out, "the quarantine to be seen")
        assert victim in node.command("quarantine", "list")
        (listed,) = json.loads(node.command("quarantine", "list", "--json"))
        assert (listed["cause"], listed["failures"]) == ("flapping", AFTER)
        after = job.settle(*rest, iterations=20)
        assert {s["generation"] for s in after.values()} == {drill.generation}, "it is not let in"
        assert "cleared: 0" in node.command("quarantine", "clear")
        drill.whole(victim)
