"""``rallypoint reproduce``: what a journal must say, and one process that trains it again."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rallypoint.daemon.shared.config import Config, EnvSection, PpoSection
from rallypoint.trainer import reproduce
from rallypoint.trainer.reproduce import JournalError, Reproduction, read_lineage

CONFIG = Config(
    env=EnvSection(task="pointmass", num_envs=16),
    ppo=PpoSection(hidden=(8, 8), rollout_steps=4, epochs=1, mini_batches=2, dtype="float64"),
)


def begins(generation: int, iteration: int = 0) -> bytes:
    """A generation that restores."""
    sections = msgspec.to_builtins(CONFIG)
    config = {name: sections[name] for name in ("job", "env", "ppo")}
    line = {"event": "generation", "generation": generation, "restore": True}
    return json.dumps({**line, "iteration": iteration, "config": config}).encode()


def committed(
    iteration: int,
    *ranks: tuple[tuple[int, ...], tuple[int, ...]],
    state_hash: str = "",
    generation: int = 1,
) -> bytes:
    """An iteration with (blocks, those of them that were cut) of each rank."""
    shares = [{"blocks": blocks, "cut": cut} for blocks, cut in ranks]
    line: dict[str, Any] = {"event": "iteration", "generation": generation, "ranks": shares}
    rest = {"world_size": len(ranks), "state_hash": state_hash, "env_steps_total": 0}
    return json.dumps({**line, **rest, "iteration": iteration}).encode()


FIRST = committed(1, ((0, 1), (0, 1)))
SECOND = committed(2, ((0, 1), ()))
OTHER = b'{"event": "recovery", "generation": 1}'


def test_what_a_restore_has_wound_back_is_left_out() -> None:
    third = committed(3, ((0,), ()))
    again = committed(2, ((0, 1), (0, 1)), generation=2)
    lineage = read_lineage([begins(1), FIRST, OTHER, SECOND, third, b'{"torn', begins(2, 1), again])
    assert [(x.iteration, x.generation, x.cut) for x in lineage.iterations] == [
        (1, 1, (0, 1)),
        (2, 2, (0, 1)),
    ]
    assert lineage.config == CONFIG


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([FIRST], "no line of the journal has the configuration of the job; give"),
        ([begins(1), FIRST, committed(4, ((0,), ()))], r"lacks iterations \[2, 3\]"),
    ],
)
def test_a_journal_that_is_not_whole_is_refused(lines: list[bytes], why: str) -> None:
    with pytest.raises(JournalError, match=why):
        read_lineage(lines)


def test_envs_cannot_go_on_with_episodes_that_nobody_began() -> None:
    reproduction = Reproduction(CONFIG)
    first, second = read_lineage([begins(1), committed(1, ((0,), (0,))), SECOND]).iterations
    reproduction.step(first)
    with pytest.raises(JournalError, match=r"iteration 2: env blocks \[1\] go on"):
        reproduction.step(second)
    reproduction.close()


def test_it_says_where_the_first_difference_is(tmp_path: Path) -> None:
    """Episodes that were cut make another training than those that went on."""
    lines = [begins(1), FIRST, SECOND, committed(3, ((1,), ()), ((0,), (0,)))]
    trained = Reproduction(CONFIG)
    hashes = [trained.step(line) for line in read_lineage(lines).iterations]
    trained.close()
    shares = [((0, 1), (0, 1)), ((0, 1), ()), ((0, 1), ())]
    whole = [
        committed(i, s, state_hash=h)
        for i, (s, h) in enumerate(zip(shares, hashes, strict=True), 1)
    ]
    report = reproduce.reproduce(read_lineage([begins(1), *whole]), None)
    assert (report.iterations, report.equal_hashes, report.first_difference) == (3, 2, 3)
    assert report.env_steps == 3 * 16 * 4
    assert report.difference is None
