"""Figures of a benchmark as one JSON document, and that document as text."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np

from rallypoint.ops.bench.peer import BOUND_S, PeerKill
from rallypoint.ops.bench.recovery import PHASES, Kill, Recovery
from rallypoint.ops.bench.resources import Usage, growth
from rallypoint.ops.bench.soak import KINDS, Blow, Soak
from rallypoint.ops.bench.throughput import Round

Figures = dict[str, float | int | None]


def summary(values: Iterable[float | None]) -> Figures:
    """p50, p95 and greatest of the values that are there, and how many they are. Percentiles are
    interpolated linearly between the two nearest."""
    present = [value for value in values if value is not None]
    if not present:
        return {"n": 0, "p50": None, "p95": None, "max": None}
    p50, p95 = np.percentile(present, [50, 95])
    return {"n": len(present), "p50": float(p50), "p95": float(p95), "max": max(present)}


def recovery_document(
    recovery: Recovery, peers: Sequence[PeerKill], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that one run of ``bench recovery`` found."""
    kills = recovery.kills
    beyond = [_less(_total(kill), recovery.step_s) for kill in kills]
    document: dict[str, Any] = {
        "benchmark": "recovery",
        **settings,
        "recovered": sum(kill.recovered for kill in kills),
        "survivors_kept": sum(kill.survivors_kept for kill in kills),
        "hash_mismatches": recovery.hash_mismatches,
        "iterations": recovery.iterations,
        "optimiser_step_s": recovery.step_s,
        "seconds": {phase: summary(kill.seconds[phase] for kill in kills) for phase in PHASES},
        "beyond_step": summary(beyond),
        "beyond_step_and_rollout": summary(
            _less(value, kill.rollout_s) for value, kill in zip(beyond, kills, strict=True)
        ),
        "back": summary(kill.back_s for kill in kills),
        "entry_stall": summary(recovery.entry_stalls_s),
        "error": recovery.error,
        "kills": [asdict(kill) for kill in kills],
        "peer": None,
    }
    if peers:
        document["peer"] = _peer(peers, document["seconds"]["total"]["p50"])
    return document


def recovery_text(document: Mapping[str, Any]) -> str:
    """The document as a table."""
    kills = document["kills"]
    outcome = (
        f"{document['recovered']} of {len(kills)} kills recovered, survivors kept their process in "
        f"{document['survivors_kept']}, {document['hash_mismatches']} hash mismatches, "
        f"{document['iterations']} iterations committed"
    )
    lines = [
        f"{document['task']}, {document['workers']} workers, seed {document['seed']}: {outcome}",
        "",
        f"{'seconds from the kill':<34}{'n':>4}{'p50':>9}{'p95':>9}{'max':>9}",
        *(_row(phase, document["seconds"][phase]) for phase in PHASES),
        _row("total - optimiser step", document["beyond_step"]),
        _row("total - optimiser step - rollout", document["beyond_step_and_rollout"]),
        _row("replacement trains", document["back"]),
        _row("its entry holds survivors up for", document["entry_stall"]),
        "",
        f"one optimiser step: {_seconds(document['optimiser_step_s'])} s (median)",
        "rollout: for how long survivors went on collecting meanwhile",
    ]
    peer = document["peer"]
    if peer is not None:
        lines += [
            f"torchrun, same machine, {document['workers']} workers, {len(peer['kills'])} kill(s): "
            f"all ranks train again after {_bounded(peer['all_s'])} s, "
            f"{'-' if peer['ratio'] is None else format(peer['ratio'], '.0f')} times our total p50"
            + (" or more" if peer["not_back"] else "")
        ]
    if document["error"] is not None:
        lines.append(f"ended early: {document['error']}")
    return "\n".join(lines)


def kill_text(number: int, kill: Kill) -> str:
    """One kill, as it is over."""
    if not kill.recovered:
        return f"kill {number}: {kill.worker} in {kill.phase}: NOT RECOVERED"
    return (
        f"kill {number}: {kill.worker} in {kill.phase}: next step of all survivors after "
        f"{_seconds(_total(kill))} s, replacement after {_seconds(kill.back_s)} s"
    )


def soak_document(soak: Soak, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that one run of ``bench soak`` found."""
    return {
        "benchmark": "soak",
        **settings,
        "dealt": len(soak.blows),
        "went_on": sum(blow.still_s is not None for blow in soak.blows),
        "iterations": soak.iterations,
        "generations": soak.generations,
        "hash_mismatches": soak.hash_mismatches,
        "still_s": {
            kind: summary(blow.still_s for blow in soak.blows if blow.kind == kind)
            for kind in KINDS
        },
        "held": {
            name: {"n": len(samples), "growth": _growth(samples)}
            for name, samples in soak.samples.items()
        },
        "violations": soak.violations,
        "blows": [asdict(blow) for blow in soak.blows],
    }


def soak_text(document: Mapping[str, Any]) -> str:
    """The document as two tables and a verdict."""
    wrong = document["violations"]
    head = f"{document['task']}, {document['workers']} workers, seed {document['seed']}"
    outcome = (
        f"{head}: {document['went_on']} of {document['kills']} kills survived, "
        f"{document['iterations']} iterations in {document['generations']} generations, "
        f"{document['hash_mismatches']} hash mismatches, {len(wrong)} violations"
    )
    return "\n".join(
        [
            outcome,
            "",
            f"{'training stood still, s, by victim':<34}{'n':>4}{'p50':>9}{'p95':>9}{'max':>9}",
            *(_row(kind, document["still_s"][kind]) for kind in KINDS),
            "",
            f"{'held, early -> late (medians)':<34}{'n':>4}{'fds':>13}{'threads':>13}{'MiB':>17}",
            *(_held_row(name, held) for name, held in document["held"].items()),
            *(f"violation: {text}" for text in wrong),
        ]
    )


def blow_text(number: int, blow: Blow) -> str:
    """One kill, as it is over."""
    return f"kill {number}: {', '.join(blow.victims)}: stood still for {_seconds(blow.still_s)} s"


def throughput_document(rounds: Sequence[Round], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Medians over the rounds, and the rounds themselves."""
    names = ("env_only", "plain", "elastic", "training_over_env", "elastic_over_plain")
    return {
        "benchmark": "throughput",
        **settings,
        **{name: median(getattr(one, name) for one in rounds) for name in names},
        "rounds": [{name: getattr(one, name) for name in names} for one in rounds],
    }


def throughput_text(document: Mapping[str, Any]) -> str:
    """The document as a table."""
    rounds, head = len(document["rounds"]), f"{document['task']}, {document['workers']} workers"
    rates = (("simulator alone", "env_only"), ("plain DDP", "plain"), ("elastic job", "elastic"))
    ratios = (
        ("elastic job / simulator alone", "training_over_env"),
        ("elastic job / plain DDP", "elastic_over_plain"),
    )
    lines = [
        f"{head}, {document['num_envs']} envs: medians of {rounds} x {document['iterations']} iterations",
        "",
        *(f"{name:<34}{document[key]:>12,.0f} env steps/s" for name, key in rates),
        *(f"{name:<34}{document[key]:>12.3f}" for name, key in ratios),
    ]
    return "\n".join(lines)


def _growth(samples: Sequence[Usage]) -> dict[str, Any] | None:
    found = growth(samples)
    return None if found is None else {name: asdict(one) for name, one in found.items()}


def _held_row(name: str, held: Mapping[str, Any]) -> str:
    found = held["growth"]
    if found is None:
        return f"{name:<34}{held['n']:>4}  too few samples"
    fds, threads = (f"{found[k]['early']:g} -> {found[k]['late']:g}" for k in ("fds", "threads"))
    early, late = (found["rss_bytes"][k] / 2**20 for k in ("early", "late"))
    return f"{name:<34}{held['n']:>4}{fds:>13}{threads:>13}{f'{early:.1f} -> {late:.1f}':>17}"


def _peer(peers: Sequence[PeerKill], ours_s: float | None) -> dict[str, Any]:
    """A kill that torchrun did not come back from counts as the bound: the ratio is then a least one."""
    times = [BOUND_S if peer.all_s is None else peer.all_s for peer in peers]
    p50 = summary(times)["p50"]
    return {
        "system": "torchrun --standalone --max-restarts=3, plain DDP loop",
        "bound_s": BOUND_S,
        "not_back": sum(peer.all_s is None for peer in peers),
        "all_s": p50,
        "ratio": None if ours_s is None or p50 is None else p50 / ours_s,
        "kills": [asdict(peer) for peer in peers],
    }


def _total(kill: Kill) -> float | None:
    return kill.seconds["total"]


def _less(value: float | None, amount: float | None) -> float | None:
    return None if value is None or amount is None else value - amount


def _row(name: str, figures: Mapping[str, Any]) -> str:
    columns = "".join(f"{_seconds(figures[key]):>9}" for key in ("p50", "p95", "max"))
    return f"{name:<34}{figures['n']:>4}{columns}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _bounded(value: float | None) -> str:
    if value is None:
        return "-"
    return f"more than {BOUND_S:g}" if value >= BOUND_S else f"{value:.1f}"
