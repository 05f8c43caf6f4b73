"""Clusters in virtual time: every invariant holds in every seed, every mutant is found, every seed is
replayed exactly."""

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.ops.simulation import running
from rallypoint.ops.simulation.command import COMMAND, Tally
from rallypoint.ops.simulation.mutants import MUTANTS
from rallypoint.ops.simulation.running import Asked, Outcome, run
from rallypoint.ops.simulation.scenario import FAULTS, Scenario, draw

SEEDS = 2000
CHUNK = 125
FOUND_WITHIN = 200
"""A mutant is found by the first seeds of those that run here, or not at all."""
MATTERS: dict[str, Callable[[Scenario], bool]] = {
    "holder_is_not_chosen": lambda scenario: (
        not scenario.shared_checkpoints
        and (scenario.spares > 0 or scenario.max_workers < scenario.workers)
    )
}
"""Of these rules: in which of the scenarios it has anything to say."""


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    return parser.parse_args(words)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_invariant_holds_in_every_seed(first: int) -> None:
    faults: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        outcome = run(seed, Asked())
        assert not outcome.violation, (
            f"rallypoint simulate --trace --first-seed {seed}: {outcome.message}"
        )
        assert outcome.iterations or draw(seed).end == "stopped"  # before anything is committed
        assert outcome.generations
        faults.update(outcome.faults)
    assert set(faults) == set(FAULTS), "a kind of fault never happened"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(9420, id="an agreed end, etcd back late, its leader gone"),
        pytest.param(10629, id="an agreed end that nobody could write"),
        pytest.param(34899, id="a drain waits for a plan, and the job ends"),
        pytest.param(8212, id="stopped on a node that the others cannot do without"),
        pytest.param(203247, id="long iterations, an error of the program in the 32nd"),
        pytest.param(96113, id="stopped on the node that holds the only checkpoint"),
        pytest.param(
            335130, id="a new lease while the leader's key was asked for with the old one"
        ),
    ],
)
def test_what_a_long_run_found_stays_mended(seed: int) -> None:
    outcome = run(seed, Asked())
    assert not outcome.violation, outcome.message


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_a_job_of_a_thousand_nodes_forms_and_trains(seed: int) -> None:
    faults = (
        "worker_killed",
        "node_killed",
        "machine_lost",
        "supervisor_killed",
        "etcd_leader_change",
        "several_at_once",
    )
    outcome = run(seed, Asked(nodes=1000, faults=faults))
    assert not outcome.violation, outcome.message
    assert outcome.nodes == 1000
    assert outcome.generations > 1
    assert outcome.iterations


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_rule_that_is_left_out_is_found(mutant: str) -> None:
    matters = MATTERS.get(mutant)
    seeds = itertools.islice(
        (s for s in range(SEEDS) if matters is None or matters(draw(s))), FOUND_WITHIN
    )
    found = next((o for s in seeds if (o := run(s, Asked(mutant=mutant))).violation), None)
    assert found is not None, f"{FOUND_WITHIN} seeds pass without this rule"
    assert not run(found.seed, Asked()).violation, "it is put back afterwards"


@pytest.mark.slow
def test_a_seed_is_replayed_exactly_in_another_process() -> None:
    command = [sys.executable, "-m", "rallypoint.daemon.cli", "simulate", "--seeds", "1"]
    said = [
        subprocess.run(
            [*command, "--first-seed", "7", "--trace"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert "PLAN 1 forced start" in said[0]
    assert "FAULT" in said[0]
    assert said[0].endswith("every invariant held\n")


def test_the_command_counts_and_says_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--seeds", "2", "--first-seed", "5", "--jobs", "1", "--json")
    assert COMMAND.run(parse(*words)) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["seeds"], document["violations"], document["failed"]) == (2, {}, [])
    assert COMMAND.run(parse(*words[:-1], "--mutant", "number_used_again")) == 1
    text = capsys.readouterr().out
    assert "violations: one_plan" in text
    seed = text.split("failed seeds: ")[1].split()[0]
    command = f"rallypoint simulate --trace --mutant number_used_again --first-seed {seed}"
    assert command in text, "the command that replays this seed"


def test_a_run_that_is_interrupted_says_how_it_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_seeds(seeds: range, asked: Asked, jobs: int) -> Iterator[Outcome]:
        yield from (Outcome(seed) for seed in seeds[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "run_many", two_seeds)
    assert COMMAND.run(parse("--seeds", "10", "--first-seed", "5")) == 130
    assert "the rest: --first-seed 7 --seeds 8" in capsys.readouterr().err


def test_a_long_run_says_now_and_then_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally(range(10, 30), "rallypoint simulate --trace --first-seed")
    tally.take(Outcome(10))
    tally.take(Outcome(11, "liveness", "liveness: there is no plan"))
    tally.tell_progress()
    assert capsys.readouterr().err == "", "the last line is not old"
    tally.told_s -= 60.0
    tally.tell_progress()
    said = capsys.readouterr().err
    assert "2 of 20 seeds, 1 failed" in said
    assert "next seed 12" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--mutant", "x"), "--mutant x: none of number_used_again"),
        (("--faults", "fire"), "--faults fire: none of worker_killed"),
        (("--seeds", "0"), "must be at least 1"),
    ],
    ids=["mutant", "fault", "seeds"],
)
def test_what_does_not_exist_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        COMMAND.run(parse(*words))
