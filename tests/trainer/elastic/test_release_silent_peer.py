"""A peer that is stopped right before a collective: the others are released from it, one by one of all
collectives that there are, and train on while it still is silent.

Nothing but the supervisor's plan ends their wait: the peer's connections stay open, and a collective
of its own accord would wait for `collective_s` (120 s), twice the bound of every wait here.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rallypoint.daemon.executors import proctable
from rallypoint.daemon.shared import collectives, messages
from rallypoint.daemon.shared.config import (
    AuxSection,
    Config,
    EnvSection,
    MembershipSection,
    PpoSection,
)
from rallypoint.daemon.shared.exitcodes import EXIT_RESTART_COLD
from rallypoint.daemon.shared.failpoints import LOG_VARIABLE, VARIABLE
from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.timeouts import derive
from rallypoint.trainer.elastic.group import ProcessGroup
from tests.fakes.scripted_supervisor import ScriptedSupervisor
from tests.faults.injectors.arming import Arming

pytestmark = [pytest.mark.slow, pytest.mark.faults]

RIGHT_BEFORE = {
    "who_is_where": "who_is_where",
    "broadcast": "broadcast",
    "hash_compare": "hash_gather",
    "advantage_moments": "gae",
    "mini_batch": "mini_batch",
    "gradients": "backward_begin",
    "epoch_moments": "epoch_moments",
    "aux_counts": "aux_counts",
    "last": "last_collective",
    "barrier": "prepared",
    "conclude": "conclude",
    "block_count": "block_count",
    "blocks": "blocks",
    "block_gradients": "backward_begin",
    "rows_wanted": "rows_wanted",
    "rows_bytes": "rows_bytes",
    "rows": "rows",
}
"""The failpoint right before each collective."""
FORMING = ("who_is_where", "broadcast", "hash_compare")
ROWS = ("rows_wanted", "rows_bytes", "rows")
"""With ``env.backup = "node"`` and members on several nodes, when a generation begins."""
TRAINING = {
    "advantage_moments": "default",
    "mini_batch": "default",
    "gradients": "default",
    "last": "default",
    "barrier": "default",
    "block_count": "ordered",
    "blocks": "ordered",
    "block_gradients": "ordered",
    "epoch_moments": "sonic_epochs",
    "aux_counts": "latent",
}
"""Collectives of every iteration, and the job of `CONFIGS` that runs them."""
STUCK_WORKER = Path(__file__).parents[2] / "fakes/stuck_worker.py"
CONFIG = Config(
    env=EnvSection(task="pointmass", num_envs=16),
    ppo=PpoSection(hidden=(16, 16), rollout_steps=8, epochs=2),
    membership=MembershipSection(orphan_grace_s=5.0),
)
CONFIGS = {
    "default": CONFIG,
    "ordered": replace(CONFIG, ppo=replace(CONFIG.ppo, reduction="ordered")),
    "sonic_epochs": replace(CONFIG, ppo=replace(CONFIG.ppo, normaliser_update="sonic_epochs")),
    "latent": replace(CONFIG, aux=AuxSection(latent=4)),
    "backup": replace(CONFIG, env=replace(CONFIG.env, backup="node", budget="global", num_envs=48)),
}


class Scene:
    """Two workers that stay, and a third one, of another node, that is stopped again and again."""

    def __init__(self, supervisor: ScriptedSupervisor, arming: Arming) -> None:
        self.supervisor = supervisor
        self.arming = arming
        self.stay = [supervisor.start(slot) for slot in range(2)]
        self.third = supervisor.start(2, node="other")
        supervisor.wait_ready(*self.stay, self.third)
        supervisor.publish([*self.stay, self.third], restore=True, commit_first=True)
        self.train(*self.stay, self.third)

    def train(self, *keys: WorkerKey) -> None:
        """Wait for three more iterations of these."""
        newest = max((c.iteration for c in self.supervisor.of(messages.Committed)), default=0)
        self.supervisor.wait_committed(newest + 3, *keys)

    def go_on(self) -> None:
        """The silent one goes on, and comes back as a newcomer, whatever it once knew."""
        os.kill(self.supervisor.processes[self.third].pid, signal.SIGCONT)
        self.let_third_in()
        self.train(*self.stay, self.third)

    def let_third_in(self) -> None:
        members = [*self.stay, self.third]
        self.supervisor.publish(members, kind="planned", survivors=self.stay)

    def wait_until_third_is_silent(self, collective: str) -> None:
        """It is stopped at the point armed, and both others wait for it in the collective behind it."""
        self.supervisor.poll(
            lambda: bool(self.arming.fired()), lambda: f"{collective}: nothing fired"
        )
        (fired,) = self.arming.fired()
        self.arming.disarm()
        assert fired.pid == self.supervisor.processes[self.third].pid
        self.supervisor.poll(self.third_is_stopped, lambda: "it is not stopped")
        for key in self.stay:
            self.supervisor.poll_page(key.slot, lambda page: page.inside)

    def third_is_stopped(self) -> bool:
        entry = proctable.read(self.supervisor.processes[self.third].pid)
        return entry is not None and entry.state == "T"

    def release(self) -> None:
        """A plan without the silent one; the others train on in it, and it still is silent."""
        plan = self.supervisor.publish(self.stay, survivors=self.stay)
        self.supervisor.wait(
            lambda: self._stepped_in(plan.generation) == set(self.stay),
            what="both to step without the silent one",
        )
        self.train(*self.stay)
        assert self.third_is_stopped()
        for key in self.stay:
            assert self.supervisor.processes[key].poll() is None
            numbers = [c.iteration for c in self.supervisor.of(messages.Committed, key)]
            assert numbers == list(range(numbers[0], numbers[-1] + 1))

    def _stepped_in(self, generation: int) -> set[WorkerKey]:
        stepped = self.supervisor.of(messages.Stepped)
        return {s.key for s in stepped if s.generation == generation}


class Scenes:
    """One scene for all cases of a job in a row; a case that fails takes it with it."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._count = 0
        self._open: tuple[ScriptedSupervisor, Scene] | None = None
        self._job = ""

    @contextmanager
    def case(self, job: str = "default") -> Iterator[Scene]:
        if self._job != job:
            self.close()
        if self._open is None:
            self._count += 1
            self._job = job
            self._open = begin(self._base / str(self._count), CONFIGS[job])
        try:
            yield self._open[1]
        except BaseException:  # whatever it was: the scene is of no use to the next case
            self.close()
            raise

    def close(self) -> None:
        if self._open is not None:
            self._open[0].__exit__()
            self._open = None


def begin(directory: Path, config: Config) -> tuple[ScriptedSupervisor, Scene]:
    directory.mkdir()
    arming = Arming(directory)
    supervisor = ScriptedSupervisor(
        directory / "run", config, failpoints=arming.environment[VARIABLE]
    )
    supervisor.failpoint_log = Path(arming.environment[LOG_VARIABLE])
    supervisor.__enter__()
    try:
        return supervisor, Scene(supervisor, arming)
    except BaseException:  # nothing may be left running
        supervisor.__exit__()
        raise


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenes]:
    scenes = Scenes(tmp_path_factory.mktemp("release"))
    yield scenes
    scenes.close()


def test_every_collective_is_tried() -> None:
    assert {*TRAINING, *FORMING, *ROWS, "conclude"} == RIGHT_BEFORE.keys() == {*collectives.NAMES}


def test_the_group_of_a_warm_up_is_no_generation_that_a_plan_could_end() -> None:
    group = ProcessGroup(derive(CONFIG), torch.device("cpu"), sys.exit)
    assert group.release(before=9) == 0
    assert not group.released


@pytest.mark.parametrize("collective", TRAINING)
def test_released_from_a_collective_of_an_iteration(scenes: Scenes, collective: str) -> None:
    with scenes.case(TRAINING[collective]) as scene:
        scene.arming.arm(f"{RIGHT_BEFORE[collective]}:2=stop")
        scene.wait_until_third_is_silent(collective)
        scene.release()
        scene.go_on()


@pytest.mark.parametrize("collective", [*FORMING, *ROWS])
def test_released_from_a_generation_that_begins(scenes: Scenes, collective: str) -> None:
    with scenes.case("backup" if collective in ROWS else "default") as scene:
        scene.supervisor.publish(scene.stay, survivors=scene.stay)
        scene.train(*scene.stay)
        scene.arming.arm(f"{RIGHT_BEFORE[collective]}:2=stop")
        scene.let_third_in()
        scene.wait_until_third_is_silent(collective)
        scene.release()
        scene.go_on()


def test_released_from_the_last_collective_of_the_job(scenes: Scenes) -> None:
    with scenes.case() as scene:
        supervisor = scene.supervisor
        scene.arming.arm("conclude:2=stop")
        supervisor.broadcast(messages.StopAfterIteration(reason="stopped"))
        scene.wait_until_third_is_silent("conclude")
        supervisor.publish(scene.stay, survivors=scene.stay)
        supervisor.wait(
            lambda: {m.key for m in supervisor.of(messages.Leaving)} == set(scene.stay),
            what="both to leave without the silent one",
        )
        assert scene.third_is_stopped()
        assert {m.reason for m in supervisor.of(messages.Leaving)} == {"stopped"}
        assert [supervisor.processes[key].wait(30) for key in scene.stay] == [0, 0]
    scenes.close()  # nobody is left to go on with


def test_who_cannot_be_released_ends_its_process_and_restarts_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last resort: stuck in a call that neither the word nor a closed socket ends."""
    monkeypatch.setenv("STUCK_AT", "6")
    config = replace(CONFIG, membership=MembershipSection(detect_s=1.0))
    with ScriptedSupervisor(tmp_path, config, worker=str(STUCK_WORKER)) as supervisor:
        a, b = (supervisor.start(slot) for slot in range(2))
        supervisor.wait_ready(a, b)
        supervisor.publish([a, b], restore=True)
        supervisor.wait_committed(5, a, b)
        supervisor.poll_page(1, lambda page: page.inside and page.iteration == 5)
        assert supervisor.processes[b].poll() is None
        supervisor.publish([a], survivors=[a])
        assert supervisor.processes[b].wait(60) == EXIT_RESTART_COLD
        assert "did not end within" in supervisor.output()
        supervisor.wait_committed(8, a)
