"""``rallypoint bench ppo``: our PPO beside RSL-RL's, on the same env, nets, batch, threads and dtype.

One process each, which take turns in one run; ratios are taken within a round of two turns.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import rallypoint
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.configload import load, parse_assignment, to_json
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.ops.bench.turns import Player, Turn

WARM_UP: Final = 3
"""Iterations at the start that are not timed."""
PEER: Final = "RSL-RL"
SETTINGS: Final = ("job.profile=rsl_rl", "env.num_envs=256")
"""What the benchmark sets of itself; RSL-RL's choices, so that both do the same work."""


def default_peer() -> Path:
    """Where RSL-RL is looked for."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "rallypoint" / "rsl-rl"


@dataclass(frozen=True)
class Round:
    """A turn of each; ``theirs`` is None where RSL-RL is not there."""

    ours: Turn
    theirs: Turn | None


def configuration(assignments: Sequence[str]) -> Config:
    """The configuration of both. Raises `ConfigError`, also for what RSL-RL cannot do alike."""
    given = [parse_assignment(text) for text in (*SETTINGS, *assignments)]
    config = load(command_line=given).config
    if config.ppo.dtype != "float32" or config.ppo.max_grad_norm is None:
        raise ConfigError(
            f"bench ppo with ppo.dtype={config.ppo.dtype} and ppo.max_grad_norm="
            f"{config.ppo.max_grad_norm}: RSL-RL trains in float32 and always clips"
        )
    return config


def measure(
    directory: Path, config: Config, peer: Path | None, *, rounds: int, iterations: int
) -> list[Round]:
    """``rounds`` of ``iterations`` each, the two sides first in turn. Raises `BenchError` when a side
    fails."""
    (directory / "config.json").write_bytes(to_json(config))
    module = (sys.executable, "-W", "ignore", "-m")
    with ExitStack() as stack:

        def player(name: str, program: str, extra: Mapping[str, str] | None = None) -> Player:
            command = [*module, f"rallypoint.ops.bench.{program}", str(directory)]
            one = Player(name, command, directory / f"{program}.log", extra)
            stack.enter_context(one).play(WARM_UP)
            return one

        ours = player("rallypoint", "ppo_ours")
        if peer is None:
            return [Round(ours.play(iterations), None) for _ in range(rounds)]
        source = Path(rallypoint.__file__).parents[1]
        theirs = player(PEER, "ppo_rsl_rl", {"PYTHONPATH": f"{source}{os.pathsep}{peer}"})
        found = []
        for number in range(rounds):
            if number % 2:
                last = theirs.play(iterations)
                found.append(Round(ours.play(iterations), last))
            else:
                found.append(Round(ours.play(iterations), theirs.play(iterations)))
        return found


def document(
    rounds: Sequence[Round], iterations: int, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Medians over the rounds, and the rounds themselves. A ratio above 1: we are faster."""
    names = ("env_steps_per_s", "rollout_s", "update_s")
    ours = [_figures(one.ours, iterations) for one in rounds]
    theirs = [_figures(one.theirs, iterations) for one in rounds if one.theirs is not None]
    ratios = [_ratios(*pair) for pair in zip(ours, theirs, strict=bool(theirs))]

    def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
        return {name: median(row[name] for row in rows) for name in names} if rows else None

    return {
        "benchmark": "ppo",
        **settings,
        "turns": len(rounds),
        "iterations": iterations,
        "ours": medians(ours),
        "theirs": medians(theirs),
        "ratio": medians(ratios),
        "rounds": {"ours": ours, "theirs": theirs},
    }


def text(found: Mapping[str, Any]) -> str:
    """The document as a table."""
    ours, theirs, ratios = found["ours"], found["theirs"], found["ratio"]
    head = f"{found['task']}, {found['num_envs']} envs, a process of one thread each"
    lines = [
        f"{head}: medians of {found['turns']} x {found['iterations']} iterations",
        "",
        f"{'':<26}{'rallypoint':>12}{PEER:>12}{'ratio':>9}",
    ]
    for name, label, scale in (
        ("env_steps_per_s", "env steps/s", 1.0),
        ("rollout_s", "rollout, ms an iteration", 1e3),
        ("update_s", "update, ms an iteration", 1e3),
    ):
        columns = f"{ours[name] * scale:>12,.0f}"
        if theirs is not None:
            columns += f"{theirs[name] * scale:>12,.0f}{ratios[name]:>9.3f}"
        lines.append(f"{label:<26}{columns}")
    if theirs is None:
        lines += ["", f"no {PEER} in {found['peer']}: only ours was measured (see docs/cli.md)"]
    else:
        lines += ["", "a ratio above 1: we are faster"]
    return "\n".join(lines)


def _figures(turn: Turn, iterations: int) -> dict[str, float]:
    return {
        "env_steps_per_s": turn.env_steps / turn.seconds,
        "rollout_s": (turn.seconds - turn.update_s) / iterations,
        "update_s": turn.update_s / iterations,
    }


def _ratios(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    """Above 1 where we are faster."""
    return {
        name: value / theirs[name] if name == "env_steps_per_s" else theirs[name] / value
        for name, value in ours.items()
    }
