"""How a job of several nodes ends, holds, and keeps spares."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.fakes.etcd_server import EtcdCluster, cluster
from tests.faults.injectors.job import WAIT_S
from tests.faults.injectors.nodes import nodes, together

pytestmark = [pytest.mark.slow, pytest.mark.faults]

WAITS = "not starting from scratch: start the node that holds it"
ALL_TAKE_PART = ("--set", "job.min_workers=3")
NAMES = ("a", "b", "c")


def test_all_nodes_finish_at_one_iteration_and_once(tmp_path: Path, etcd: EtcdCluster) -> None:
    with nodes(tmp_path, etcd, "--iterations", "30", *ALL_TAKE_PART) as job:
        job.start(*NAMES)
        assert job.exit_codes(*NAMES) == dict.fromkeys(NAMES, 0)
        assert job.left() == []
        assert {job.last_iteration(name) for name in NAMES} == {30}
        assert job.newest_checkpoint() == 30
        record = job.record()
        assert (record["state"], record["iteration"]) == ("finished", 30)
        ends = [line for n in NAMES for line in job[n].logged("job_state")]
        assert [line["state"] for line in ends] == ["finished"]
        (again,) = job.start("b")
        assert again.process.wait(WAIT_S) == 0, "a finished job is not begun again"
        assert not again.logged("worker_started")[1:]
        job.start(*NAMES, options=("--iterations", "40"))
        assert job.exit_codes(*NAMES) == dict.fromkeys(NAMES, 0)
        assert {job.last_iteration(name) for name in NAMES} == {40}
        assert job.record()["values"]["job.iterations"] == 40


def test_a_job_that_finishes_while_etcd_is_away_leaves_its_last_checkpoint(tmp_path: Path) -> None:
    with (
        cluster(tmp_path / "etcd") as etcd,
        nodes(tmp_path, etcd, "--iterations", "60", *ALL_TAKE_PART) as job,
    ):
        job.start(*NAMES)
        job.settle(*NAMES)
        writer = job[job.by_rank("a")[0]]
        etcd.freeze(0)
        refused = writer.wait_logged("commit_question", iteration=60, allowed=False)
        assert "past the deadline of its lease" in refused["reason"]
        assert job.newest_checkpoint() < 60
        etcd.thaw(0)
        assert job.exit_codes(*NAMES) == dict.fromkeys(NAMES, 0)
        assert job.newest_checkpoint() == 60
        assert job.record()["state"] == "finished"
        assert job.left() == []


def test_a_program_error_ends_the_job_everywhere_with_one_traceback(
    tmp_path: Path, etcd: EtcdCluster
) -> None:
    with nodes(tmp_path, etcd, *ALL_TAKE_PART) as job:
        for node in job.start(*NAMES):
            node.arming.arm("rollout@30=raise")
        assert job.exit_codes(*NAMES) == dict.fromkeys(NAMES, 1)
        assert [len(job[name].arming.fired()) for name in NAMES] == [1, 1, 1]
        assert job.left() == []
        record = job.record()
        assert record["state"] == "failed"
        assert record["reason"].count("Traceback") == 1
        assert "in every worker that ran it (a/0, b/0, c/0)" in record["reason"]
        for name in NAMES:
            (ended,) = job[name].logged("supervisor_ended")
            assert ended["reason"] == record["reason"]


def test_below_min_workers_the_job_holds_and_goes_on_when_enough_are_there(
    tmp_path: Path, etcd: EtcdCluster
) -> None:
    with nodes(tmp_path, etcd, *ALL_TAKE_PART) as job:
        job.start("a", "b")
        early = job["a"].wait_for(
            lambda s: [w["state"] for w in s["workers"]] == ["ready", "ready"], "two to be ready"
        )
        assert (early["state"], early["generation"]) == ("starting", None)
        job.start("c")
        job.settle(*NAMES)
        pids = job.pids("a", "b")
        victim = "c"
        job[victim].lose()
        held = job["a"].wait_for(lambda s: s["state"] == "holding", "the job to hold")
        job["b"].wait_for(lambda s: s["state"] == "holding", "the job to hold")
        assert held["world_size"] == 2
        job.start(victim)
        job.settle(*NAMES)
        assert job.pids("a", "b") == pids


def test_a_spare_is_warm_and_enters_at_once_after_a_loss(tmp_path: Path, etcd: EtcdCluster) -> None:
    with nodes(tmp_path, etcd, "--set", "job.spares=1") as job:
        job.start(*NAMES)
        before = job["a"].wait_for(
            lambda s: together(s, 2) and "ready" in [w["state"] for w in s["workers"]], "a spare"
        )
        spare = next(w["node"] for w in before["workers"] if w["rank"] is None)
        first, second = (w["node"] for w in before["workers"] if w["rank"] is not None)
        pids = job.pids(first, spare)
        victim = job[second].mine["incarnation"]
        job[second].lose()
        job.settle(first, spare)
        assert job.pids(first, spare) == pids
        assert victim == 1


def test_after_a_total_loss_only_the_holder_of_the_newest_checkpoint_is_the_source(
    tmp_path: Path, etcd: EtcdCluster
) -> None:
    with nodes(tmp_path, etcd, "--set", "checkpoint.every_iterations=5") as job:
        job.start("a", "b")
        job.settle("a", "b", iterations=12)
        holder, other = job.by_rank("a")
        for name in ("a", "b"):
            job[name].lose()
        kept = job.newest_checkpoint()
        assert kept >= 10
        assert job[other].checkpoints() == []
        job.wait_until_expired("a", "b")
        job.start(other)
        job[other].wait_until(
            lambda: [x for x in job[other].logged("start_waits") if WAITS in x["reason"]],
            lambda: "the holder to be waited for",
        )
        assert job[other].status()["state"] == "holding"
        job.start(holder)
        job.settle(holder, other)
        restored = job[holder].wait_logged("checkpoint_restored")
        assert restored["iteration"] == kept
        formed = job[other].wait_logged("generation_formed", iteration=kept)
        assert formed["source"].startswith(f"{holder}/")


def test_a_node_that_has_lost_its_directory_is_no_survivor_of_what_it_was_in(
    tmp_path: Path, etcd: EtcdCluster
) -> None:
    """The plan in the store still names its worker of before, and a new one must not be taken for it."""
    with nodes(tmp_path, etcd, "--set", "checkpoint.every_iterations=2") as job:
        job.start("a")
        job.settle("a", iterations=6)
        job["a"].wait_until(
            lambda: (job.record()["checkpoint"] or (0, 0))[1], lambda: "a checkpoint in the record"
        )
        job["a"].lose()
        job.wait_until_expired("a")
        shutil.rmtree(job["a"].rundir.path)
        (node,) = job.start("a")
        node.wait_until(
            lambda: [x for x in node.logged("start_waits") if WAITS in x["reason"]],
            lambda: "the holder to be waited for",
        )
        assert node.status()["state"] == "holding"
        assert node.mine["incarnation"] == 2
        assert not node.logged("worker_fault")


def test_a_node_that_differs_is_refused_in_words_and_disturbs_nobody(
    tmp_path: Path, etcd: EtcdCluster
) -> None:
    with nodes(tmp_path, etcd) as job, nodes(tmp_path / "other", etcd) as other:
        other.start("x")
        other.settle("x")
        other["x"].lose()
        job.start("a")
        before = job.settle("a")["a"]
        refused = job.start("b", options=("--set", "job.seed=7"))[0]
        assert refused.process.wait(WAIT_S) == 2
        assert "other values (job.seed: 1 -> 7; hash" in refused.output()
        for option, words in (
            ("job.iterations=12", "job.iterations: none -> 12"),
            ("job.min_workers=2", "job.min_workers: 1 -> 2"),
            ("membership.hang_s=7.0", "membership.hang_s: none -> 7.0"),
        ):
            refused = job.start("c", options=("--set", option))[0]
            assert refused.process.wait(WAIT_S) == 2
            assert f"runs with other values ({words}; nodes: a)" in refused.output()
        stranger = other.start("x", options=("--job", job.job))[0]
        assert stranger.process.wait(WAIT_S) == 2
        assert f"holds job '{other.job}', not job.name" in stranger.output()
        state = other.base / "x" / "run" / "state.json"
        state.write_text(state.read_text().replace(other.job, job.job))
        shutil.rmtree(other.base / "x" / "run" / "checkpoints")  # they would be refused before
        stranger = other.start("x", options=("--job", job.job))[0]
        assert stranger.process.wait(WAIT_S) == 2
        assert f"holds another job '{job.job}' (uid {job.record()['uid']})" in stranger.output()
        after = job.settle("a")["a"]
        assert after["generation"] == before["generation"]


def test_a_quarantined_slot_is_seen_on_every_node_and_cleared_by_the_operator(
    tmp_path: Path, etcd: EtcdCluster
) -> None:
    with nodes(tmp_path, etcd, "--set", "membership.quarantine_after=1") as job:
        job.start("a")
        job.settle("a")
        pids = job.pids("a")
        (node,) = job.start("b")
        node.arming.arm("warm_up=kill")
        (fired,) = node.wait_fired()
        assert fired.entry == "warm_up=kill"
        for name in ("a", "b"):
            job[name].wait_for(
                lambda s: [w["state"] for w in s["workers"]] == ["training", "quarantined"],
                "the quarantine",
            )
        (there,) = json.loads(node.command("quarantine", "list", "--json"))
        assert (there["node"], there["slot"], there["failures"]) == ("b", 0, 1)
        (seen,) = json.loads(job["a"].command("quarantine", "list", "--json"))
        assert seen == {**dict.fromkeys(there), "node": "b", "slot": 0, "cause": "crashes"}
        node.command("quarantine", "clear")
        job.settle("a", "b")
        assert job.pids("a") == pids


def test_a_quarantined_node_is_seen_and_cleared_on_any_node(
    tmp_path: Path, etcd: EtcdCluster
) -> None:
    with nodes(tmp_path, etcd, "--set", "membership.quarantine_after=1") as job:
        job.start(*NAMES)
        job.settle(*NAMES)
        pids = job.pids("b", "c")
        job["b"].process.send_signal(signal.SIGSTOP)
        job.wait_until_expired("b")
        before = job["c"].status()["generation"]
        job["a"].kill_worker()
        # The forced plan leaves it out; of the next one alone it could not tell.
        job["c"].wait_for(lambda s: s["generation"] > before, "a generation without a and b")
        job["b"].process.send_signal(signal.SIGCONT)
        job["b"].wait_logged("node_quarantined")
        job.settle("a", "c")
        job["b"].wait_until(
            lambda: job["b"].metrics()["slot_quarantined"] == 1, lambda: "the metric to show it"
        )
        (there,) = json.loads(job["b"].command("quarantine", "list", "--json"))
        assert (there["node"], there["slot"], there["cause"]) == ("b", 0, "flapping")
        assert 0 < there["seconds_left"] <= 300
        (seen,) = json.loads(job["a"].command("quarantine", "list", "--json"))
        assert seen == {**there, "failures": None, "seconds_left": None}
        assert job["c"].command("quarantine", "clear", "--node", "b") == "cleared: 0\n"
        job["b"].wait_logged("quarantine_cleared")
        job.settle(*NAMES)
        assert job.pids("b", "c") == pids, "warm all the time"
        assert job["b"].metrics()["slot_quarantined"] == 0


def test_past_the_lease_nothing_commits_and_nothing_forms_but_training_goes_on(
    tmp_path: Path,
) -> None:
    with (
        cluster(tmp_path / "etcd") as servers,
        nodes(tmp_path, servers, "--set", "checkpoint.every_iterations=5") as job,
    ):
        job.start("a", "b")
        before = job.settle("a", "b")
        first, second = job.by_rank("a")
        pids = job.pids(first)
        servers.freeze(0)
        refused = job[first].wait_logged("commit_question", allowed=False)
        assert refused["reason"] == "this supervisor is past the deadline of its lease"
        trained = job[first].status()
        job[first].wait_for(lambda s: s["iteration"] > trained["iteration"] + 5, "training")
        killed = job[second].kill_worker()
        job[second].wait_logged("worker_exited", pid=killed)
        job[first].wait_logged("collective_broken")
        assert job[first].status()["generation"] == before[first]["generation"]
        servers.thaw(0)
        job.settle("a", "b")
        assert job.pids(first) == pids


def test_without_etcd_a_node_that_was_restarted_drains_by_force_and_the_other_one_holds(
    tmp_path: Path,
) -> None:
    with (
        cluster(tmp_path / "etcd") as servers,
        nodes(tmp_path, servers, "--set", "node.stop_grace_s=3.0") as job,
    ):
        job.start("a", "b")
        job.settle("a", "b")
        pids = job.pids("a", "b")
        servers.kill(0)
        job["b"].kill_supervisor()
        job.start("b")
        job["b"].wait_logged("worker_adopted", pid=pids["b"])
        job["b"].wait_for(lambda s: s["state"] == "running", "its worker to train on")
        assert job.end("b") == {"b": 0}
        assert job["b"].logged("drain_requested")
        assert not job["b"].logged("stop_requested"), "it is not the only node"
        assert job["b"].processes_left() == []
        held = job["a"].wait_for(lambda s: s["state"] == "holding", "the other one to hold")
        assert "no other generation can be agreed" in held["reason"]
        servers.restart(0)
        job.settle("a")
        assert job.pids("a") == {"a": pids["a"]}
