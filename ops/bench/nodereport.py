"""Figures of ``rallypoint bench recovery --nodes`` as one JSON document, and that document as text."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rallypoint.ops.bench.nodepeer import PeerLoss
from rallypoint.ops.bench.noderecovery import DRILLS, Drill, NodeLoss, NodeRun
from rallypoint.ops.bench.peer import BOUND_S
from rallypoint.ops.bench.report import summary


def document(
    runs: Sequence[NodeRun], peers: Mapping[Drill, Sequence[PeerLoss]], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that was found, a case for each drill and detect_s."""
    losses = [loss for run in runs for loss in run.losses]
    cases = [
        _case(drill, detect_s, losses, peers.get(drill, ()))
        for drill in DRILLS
        for detect_s in sorted({loss.detect_s for loss in losses}, reverse=True)
        if any((loss.drill, loss.detect_s) == (drill, detect_s) for loss in losses)
    ]
    return {
        "benchmark": "recovery of nodes",
        **settings,
        "cpus": os.cpu_count(),
        "cases": cases,
        "errors": [run.error for run in runs if run.error is not None],
        "losses": [asdict(loss) for loss in losses],
        "peer_system": "torchrun --rdzv-backend=c10d --max-restarts=5, an agent a node, plain DDP loop",
        "peer_bound_s": BOUND_S,
        "peer_losses": {drill: [asdict(one) for one in found] for drill, found in peers.items()},
    }


def _case(
    drill: Drill, detect_s: float, losses: Sequence[NodeLoss], peers: Sequence[PeerLoss]
) -> dict[str, Any]:
    """A loss that torchrun did not come back from counts as the bound: the ratio is then a least one."""
    mine = [loss for loss in losses if (loss.drill, loss.detect_s) == (drill, detect_s)]
    total = summary(loss.total_s for loss in mine)
    peer = summary(BOUND_S if one.all_s is None else one.all_s for one in peers)
    ours_s, peer_s = total["p50"], peer["p50"]
    return {
        "drill": drill,
        "detect_s": detect_s,
        "total": total,
        "back": summary(loss.back_s for loss in mine),
        "survivors_kept": sum(loss.survivors_kept for loss in mine),
        "goal_s": 1.5 if drill == "killed" else detect_s + 1.0,
        "peer": peer,
        "peer_not_back": sum(one.all_s is None for one in peers),
        "ratio": None if not ours_s or peer_s is None else peer_s / ours_s,
    }


def text(document: Mapping[str, Any]) -> str:
    """The document as a table."""
    head = (
        f"{document['task']}, {document['nodes']} nodes with one worker each, {document['cpus']} CPUs, "
        f"seed {document['seed']}"
    )
    columns = f"{'n':>4}{'p50':>9}{'p95':>9}{'max':>9}{'goal p95':>10}{'torchrun':>10}{'ratio':>7}"
    lines = [head, "", f"{'next step of all survivors, s':<34}{columns}"]
    lines += [_case_text(case) for case in document["cases"]]
    kept = sum(case["survivors_kept"] for case in document["cases"])
    note = (
        f"survivors kept their process in {kept} of {len(document['losses'])}; torchrun: c10d, median "
        f"until all survivors train again, at most {document['peer_bound_s']:g} s are waited for"
    )
    lines += ["", note]
    if not any(case["drill"] == "silent" for case in document["cases"]):
        lines.append("no node fell silent: that needs network namespaces (root, iproute2)")
    return "\n".join([*lines, *(f"ended early: {error}" for error in document["errors"])])


def _case_text(case: Mapping[str, Any]) -> str:
    total, peer_s, ratio = case["total"], case["peer"]["p50"], case["ratio"]
    figures = "".join(
        f"{'-' if total[key] is None else format(total[key], '.3f'):>9}"
        for key in ("p50", "p95", "max")
    )
    more = ">" if case["peer_not_back"] else ""
    theirs = "-" if peer_s is None else f"{more}{peer_s:.1f}"
    times = "-" if ratio is None else f"{more}{ratio:.0f}"
    name = f"node {case['drill']}, detect_s {case['detect_s']:g}"
    return f"{name:<34}{total['n']:>4}{figures}{case['goal_s']:>10.1f}{theirs:>10}{times:>7}"


def loss_text(loss: NodeLoss) -> str:
    """One loss, as it is over."""
    name = f"detect_s {loss.detect_s:g}, node {loss.node} {loss.drill}"
    if loss.total_s is None:
        return f"{name}: NOT RECOVERED"
    return (
        f"{name} (rank {loss.rank}): next step of all survivors after {loss.total_s:.3f} s, all "
        f"together again after {loss.back_s:.1f} s"
    )
