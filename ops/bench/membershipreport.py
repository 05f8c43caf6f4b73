"""Figures of ``rallypoint bench membership`` as one JSON document, and that document as text."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Final

from rallypoint.ops.bench.membership import KINDS, Loss, Size, Traffic
from rallypoint.ops.bench.report import summary

_TRAFFIC: Final = tuple(one.name for one in fields(Traffic))


def document(sizes: Sequence[Size], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that one run found."""
    return {
        "benchmark": "membership",
        **settings,
        "cpus": os.cpu_count(),
        "sizes": [_size_document(size) for size in sizes],
    }


def _size_document(size: Size) -> dict[str, Any]:
    changes = {"loss": [x.traffic for x in size.losses]}
    changes["return"] = [x.rejoin_traffic for x in size.losses]
    return {
        "nodes": size.nodes,
        "processes": size.processes,
        "start_s": size.start_s,
        "plan_bytes": size.plan_bytes,
        "idle_s": size.idle_s,
        "node_cpu": size.node_cpu,
        "idle": asdict(size.idle),
        "seconds": {
            kind: {
                name: summary(getattr(x, name) for x in size.losses if x.kind == kind)
                for name in ("published_s", "planned_s", "marked_s")
            }
            for kind in KINDS
        },
        "traffic": {
            change: {name: summary(getattr(x, name) for x in found)["p50"] for name in _TRAFFIC}
            for change, found in changes.items()
        },
        "nodes_cpu_s": summary(x.nodes_cpu_s for x in size.losses)["p50"],
        "losses": [asdict(loss) for loss in size.losses],
    }


def text(document: Mapping[str, Any]) -> str:
    """The document as a table for each number of nodes."""
    lines = [f"light supervisors on one etcd, {document['cpus']} CPUs, seed {document['seed']}"]
    for size in document["sizes"]:
        lines += ["", *_size_lines(size)]
    return "\n".join(lines)


def _size_lines(size: Mapping[str, Any]) -> list[str]:
    nodes, idle = size["nodes"], size["idle"]
    head = (
        f"{nodes} nodes in {size['processes']} processes, all in one generation after "
        f"{size['start_s']:.1f} s; a plan of all has {size['plan_bytes']:,} bytes"
    )
    lines = [
        head,
        f"{'seconds from the loss':<38}{'n':>4}{'p50':>9}{'p95':>9}{'max':>9}",
    ]
    for kind, seconds in size["seconds"].items():
        if not seconds["planned_s"]["n"]:
            continue
        for name, said in (("planned_s", "everybody has the plan"), ("marked_s", "it has formed")):
            figures = seconds[name]
            columns = "".join(f"{figures[key]:>9.3f}" for key in ("p50", "p95", "max"))
            lines.append(f"{f'{kind}: {said}':<38}{figures['n']:>4}{columns}")
    for change, traffic in size["traffic"].items():
        lines.append(
            f"etcd, {change} (p50): {traffic['requests']:,.0f} requests, "
            f"{traffic['watch_messages']:,.0f} watch messages, {traffic['bytes_in'] / 1e3:,.0f} kB in, "
            f"{traffic['bytes_out'] / 1e3:,.0f} kB out, {traffic['cpu_s']:.2f} s of CPU time"
        )
    each_ms = 1e3 * size["nodes_cpu_s"] / nodes
    lines.append(
        f"CPU time of one supervisor for a loss (p50): {each_ms:.1f} ms, the leader's spread"
    )
    lines.append(
        f"idle, {size['idle_s']:.0f} s: {100 * size['node_cpu']:.2f} % of a CPU for each supervisor, "
        f"{100 * idle['cpu_s']:.1f} % for etcd, {idle['bytes_in'] / nodes:.0f} + "
        f"{idle['bytes_out'] / nodes:.0f} bytes/s a node"
    )
    return lines


def loss_text(nodes: int, loss: Loss) -> str:
    """One loss, as it is over."""
    return (
        f"{nodes} nodes, {loss.kind} ({loss.node}): published after {loss.published_s:.3f} s, everybody "
        f"has the plan after {loss.planned_s:.3f} s, it has formed after {loss.marked_s:.3f} s"
    )
