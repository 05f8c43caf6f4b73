"""A running job under fault injection: real supervisor, real workers that keep ledgers."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rallypoint.daemon.commands.client import NoSupervisorError
from rallypoint.daemon.executors import proctable
from rallypoint.daemon.shared.configload import from_json
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.daemon.shared.slotpage import SlotCounters, SlotPage
from tests.fakes.scrape import scrape
from tests.fakes.supervised import Status, Supervised, trains
from tests.faults.injectors.arming import Arming, Fired
from tests.faults.injectors.signals import signal_all
from tests.faults.model.lineage import Shape
from tests.faults.model.lines import Ledger, Life, read_journal, read_ledger_lines
from tests.faults.validate.history import Counters, History

SCRIPT = Path(__file__).with_name("supervise_ledgers.py")
PACED_RUN = (str(Path(__file__).with_name("run_ledgers.py")),)
"""``rallypoint run`` itself, with the same workers."""
ROOT = Path(__file__).parents[3]
WAIT_S = 120.0
"""Bound of every wait, far above what any takes on a busy machine."""
POLL_S = 0.05
PACE_S = 0.015
OPTIONS = (
    *("--metrics-port", "0", "--set", "log.format=json", "--set", "env.task=pointmass"),
    *("--set", "env.num_envs=16", "--set", "ppo.rollout_steps=8", "--set", "ppo.epochs=2"),
    *("--set", "ppo.mini_batches=2", "--set", "ppo.hidden=[16,16]"),
    *("--set", "membership.join_debounce_s=0.1"),
    *("--set", "membership.orphan_grace_s=1.0", "--set", "checkpoint.every_iterations=5"),
)
_MARK = "FAULT_RUN"

T = TypeVar("T")


class FaultJob(Supervised):
    """One life of a supervisor on ``directory``, whose workers can be made to die at any point."""

    wait_s = WAIT_S

    def __init__(
        self,
        directory: Path,
        *options: str,
        command: tuple[str, ...] = (),
        launcher: tuple[str, ...] = (),
    ) -> None:
        """``command`` replaces the program, which is the supervisor with ledgers; ``launcher`` stands
        before it and becomes it, in the same process."""
        directory.mkdir(parents=True, exist_ok=True)
        self.rundir = RunDir(directory)
        self.log_path = directory.with_suffix(".log")
        self.arming = Arming(directory.parent)
        self.mark = f"{_MARK}={uuid.uuid4().hex}"
        self.seen: list[tuple[int, int]] = []
        names = [x.partition("=")[2] for x in options if x.startswith("node.name=")]
        self.node = names[-1] if names else "local"
        (directory / "ledger").mkdir(exist_ok=True)
        inherited = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        name, value = self.mark.split("=")
        program = command or (str(SCRIPT),)
        with self.log_path.open("ab") as log, directory.with_suffix(".out").open("ab") as out:
            self.process = subprocess.Popen(
                [
                    *(*launcher, sys.executable, *program),
                    *("--dir", str(directory), *OPTIONS, *options),
                ],
                stdout=out,
                stderr=log,
                env={
                    **inherited,
                    **self.arming.environment,
                    "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))),
                    "LEDGER_PACE_S": str(PACE_S),
                    name: value,
                },
            )

    # --- looking --------------------------------------------------------------------------------

    def status(self) -> Status:
        document = super().status()
        shown = (document["generation"] or 0, document["iteration"] or 0)
        if not self.seen or self.seen[-1] != shown:
            self.seen.append(shown)
        return document

    def wait_for(self, what: Callable[[Status], bool], why: str = "") -> Status:
        """The first status that this is true of."""
        newest: list[Status] = []

        def look() -> Status | None:
            if self.process.poll() is not None:
                raise AssertionError(f"the supervisor ended:\n{self._last_log()}")
            try:
                newest[:] = [self.status()]
            except NoSupervisorError:
                return None  # not listening yet
            return newest[0] if what(newest[0]) else None

        return self.wait_until(look, lambda: f"{why or 'a status'}; the last one is {newest}")

    def wait_until(self, look: Callable[[], T | None], what: Callable[[], str]) -> T:
        """The first thing that ``look`` finds, within a bound."""
        deadline_s = time.monotonic() + self.wait_s
        while time.monotonic() < deadline_s:
            found = look()
            if found:
                return found
            time.sleep(POLL_S)
        raise AssertionError(f"not within {self.wait_s} s: {what()}\n{self._last_log()}")

    def settle(
        self, workers: int = 3, iterations: int = 2, newer_than: Mapping[int, int] | None = None
    ) -> Status:
        """Wait until this many train, and each has committed this many iterations more; ``newer_than``
        has incarnations by slot that must have been followed by others."""

        def there(s: Status) -> bool:
            lives = {w["slot"]: w["incarnation"] for w in s["workers"]}
            return trains(s, workers) and all(lives[k] > n for k, n in (newer_than or {}).items())

        reached = self.wait_for(there, f"{workers} workers to train")
        return self.wait_for(
            lambda s: there(s) and committed_by_all(s, reached["iteration"] + iterations),
            f"{iterations} more iterations of {workers} workers",
        )

    def wait_fired(self, count: int = 1) -> list[Fired]:
        """Until this many armed points have fired; all are disarmed then."""

        def look() -> list[Fired] | None:
            fired = self.arming.fired()
            return fired if len(fired) >= count else None

        fired = self.wait_until(look, lambda: f"{count} points to fire: {self.arming.fired()}")
        self.arming.disarm()
        return fired

    def wait_logged(self, event: str, **fields: object) -> dict[str, Any]:
        """The first log line with this name and these fields."""

        def look() -> dict[str, Any] | None:
            lines = self.logged(event)
            return next((x for x in lines if all(x.get(k) == v for k, v in fields.items())), None)

        return self.wait_until(look, lambda: f"log line {event} {fields}")

    def page(self, slot: int) -> SlotCounters:
        page = SlotPage(self.rundir.page(slot))
        try:
            return page.read()
        finally:
            page.close()

    def metrics(self) -> dict[str, float]:
        return scrape(self.status()["metrics_url"])

    def history(self) -> History:
        """The books, read while no change of membership is under way."""
        status = self.status()
        early = len(read_journal(self.rundir.journal))
        values = self.metrics()
        ledgers = self._ledgers()
        newest = max((c.iteration for x in ledgers.values() for c in x.commits[-1:]), default=0)
        self.wait_for(lambda s: s["iteration"] >= newest, f"iteration {newest} in the journal")
        lost = {
            r: values[f'env_steps_lost_total{{reason="{r}"}}'] for r in ("died", "dropped", "cut")
        }
        config = from_json(self.rundir.config.read_bytes())
        return History(
            shape=Shape(config.env.block, config.ppo.rollout_steps, config.ppo.epochs),
            journal=read_journal(self.rundir.journal),
            lines_before_counters=early,
            ledgers=ledgers,
            live=frozenset(Life(w["slot"], w["incarnation"]) for w in status["workers"]),
            counters=Counters(
                env_steps=values["env_steps_total"],
                lost_died=lost["died"],
                lost_dropped=lost["dropped"],
                lost_cut=lost["cut"],
                mismatches=values["state_hash_mismatches_total"],
            ),
            seen=tuple(self.seen),
        )

    def _ledgers(self) -> dict[Life, Ledger]:
        ledgers = {}
        for path in sorted((self.rundir.path / "ledger").glob("*.page")):
            slot, incarnation = path.stem.split("-")
            page = SlotPage(path)
            ledgers[Life(int(slot), int(incarnation))] = Ledger(
                lines=read_ledger_lines(path.with_suffix(".jsonl")),
                collected_env_steps=page.read().collected_env_steps,
            )
            page.close()
        return ledgers

    def _last_log(self) -> str:
        logs = [self.log_path, *sorted((self.rundir.path / "logs").glob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-6000:]}" for path in logs)

    # --- acting ---------------------------------------------------------------------------------

    def kill(self, status: Status, *ranks: int) -> list[dict[str, Any]]:
        """SIGKILL to the workers of these ranks, from outside."""
        victims = [by_rank(status, rank) for rank in ranks]
        signal_all([victim["pid"] for victim in victims], signal.SIGKILL)
        return victims

    def end_all(self) -> list[int]:
        """End what still runs, by its id; the pids that were there."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)
        left = self.processes_left()
        for pid in left:
            entry = proctable.read(pid)
            if entry is not None:
                proctable.end_session(pid, entry.start_ticks, 5.0)
        return left

    def processes_left(self) -> list[int]:
        """Every process of this job, the supervisor included, by a mark in its environment."""
        return processes_with(self.mark)


def processes_with(mark: str) -> list[int]:
    """Every process that has this ``NAME=value`` in its environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:  # gone meanwhile
                continue
            if mark.encode() in environment.split(b"\0"):
                found.append(int(entry.name))
    return found


def by_rank(status: Status, rank: int) -> dict[str, Any]:
    """The worker that has this rank."""
    found: dict[str, Any] = next(w for w in status["workers"] if w["rank"] == rank)
    return found


def committed_by_all(status: Status, iteration: int) -> bool:
    return all((w["committed_iteration"] or 0) >= iteration for w in status["workers"])


def has_checkpoint(status: Status) -> bool:
    """There is one of a trained state; a generation that restores nothing commits iteration 0."""
    return (status["checkpoint"]["iteration"] or 0) > 0
