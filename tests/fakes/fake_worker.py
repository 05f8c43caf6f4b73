"""A worker without torch: speaks the control protocol, obeys plans at once, commits quickly.

All fake workers of a run share files in place of a process group: each says which iteration it has
collected, rank 0 of the newest plan commits once all members have, the others report what they read.
State hashes are a function of the iteration.

``FAKE_WORKER`` holds JSON: ``faults``, a list of ``[action, slot, incarnation, iteration]``. A fault
happens in the first iteration from this one on (0: before it is ready) that this life of the worker
sees. ``grace_s`` (0) is how long it trains on without a supervisor, ``hello`` has fields that differ
when it says Hello again, ``old`` leaves out what an older version does not say there. The actions are ``die`` (SIGKILL in the middle of a rollout), ``raise`` (a program error), ``exit``
(code 3), ``cold`` (code 71), ``hang`` (SIGSTOP), ``garbage`` (bytes that are no message) and ``lie`` (it says that it formed
generation 1, wherever it is).
"""

import argparse
import hashlib
import json
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

from rallypoint.daemon.shared import messages, unixsocket
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.configload import config_hash, from_json
from rallypoint.daemon.shared.exitcodes import EXIT_RESTART_COLD
from rallypoint.daemon.shared.plan import Plan, WorkerKey
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.daemon.shared.slotpage import PHASES, SlotPage
from rallypoint.trainer.elastic.ledger import Ledger
from rallypoint.trainer.elastic.link import Link

ITERATION_S = 0.02
RESTORE_S = 2.0
LIE_S = 10.0
"""Bound of a liar's wait for its end."""
HELLO_OF_OLD = ("type", "protocol", "key", "pid", "start_ticks", "versions", "config_hash")


class FakeLink(Link):
    """The link of real workers; its Hello may be that of another version."""

    options: dict[str, Any]

    def _connect(self) -> socket.socket:
        connection = unixsocket.connect(self._path)
        said = json.loads(messages.encode(self._hello)[4:])
        if self._sent_count:
            said.update(self.options.get("hello", {}))
        if self.options.get("old"):
            said = {name: said[name] for name in HELLO_OF_OLD}
        body = json.dumps(said).encode()
        connection.sendall(struct.pack(">I", len(body)) + body)
        return connection


def hello(key: WorkerKey, config: Config) -> messages.Hello:
    stat = Path("/proc/self/stat").read_text()
    return messages.Hello(
        key=key,
        pid=os.getpid(),
        start_ticks=int(stat.rpartition(")")[2].split()[19]),
        versions={},
        config_hash=config_hash(config),
    )


class SharedNumber:
    """A number in a file that all fake workers see."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> int | None:
        try:
            return int(self._path.read_text())
        except FileNotFoundError:
            return None

    def write(self, value: int) -> None:
        temporary = self._path.with_suffix(f".{os.getpid()}")
        temporary.write_text(str(value))
        temporary.replace(self._path)


class FakeWorker:
    def __init__(self, rundir: RunDir, key: WorkerKey) -> None:
        self.key = key
        self.config: Config = from_json(rundir.config.read_bytes())
        self.page = SlotPage(rundir.page(key.slot))
        self.page.put(incarnation=key.incarnation)
        self.ledger = Ledger(self.page)
        self.options: dict[str, Any] = json.loads(os.environ.get("FAKE_WORKER", "{}"))
        self.committed = SharedNumber(rundir.path / "fake-committed")
        self.arrived = {
            slot: SharedNumber(rundir.path / f"fake-arrived-{slot}")
            for slot in range(self.config.node.workers)
        }
        self.restored = SharedNumber(rundir.path / "fake-restored")
        self.saved = SharedNumber(rundir.path / "fake-checkpoint")
        self.reported = 0
        self.collecting = 0
        self.plan: Plan | None = None
        self.formed = 0
        self.marked = 0
        self.may_train = False
        self.stepped = False
        self.ask = 0
        self.served = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.link = FakeLink(
            rundir.control_socket,
            hello(self.key, self.config),
            orphan_grace_s=self.options.get("grace_s", 0.0),
            on_plan=lambda _: None,
            on_abandoned=lambda: None,
        )
        self.link.options = self.options

    def run(self) -> None:
        link = self.link
        with link.changed:
            link.start()
            assert link.changed.wait_for(lambda: link._socket is not None, 10.0)
        self.fault("early", 0)
        saved = self.saved.read()
        self.send(
            messages.Ready(
                key=self.key,
                host="127.0.0.1",
                port=self.listener.getsockname()[1],
                device="cpu",
                capacity_envs=0,
                last_formed=0,
                checkpoint=None if saved is None else (1, saved),
            )
        )
        while True:
            with link.changed:
                news = link.changed.wait(ITERATION_S)
            self.obey()
            if link.orphaned:
                sys.exit(72)
            if self.may_train and not news:
                self.step()

    def obey(self) -> None:
        orders = self.link.orders
        if orders.leave_reason is not None:
            self.leave("drained")
        if orders.plan is not None:
            self.form(orders.plan)
        if orders.formed > self.marked:
            self.marked = orders.formed
            self.begin()
        answer = orders.answers.pop(self.ask, None)
        if answer is not None:
            if not answer.allowed:
                sys.exit(4)
            self.checkpoint()
            self.may_train = True
        if orders.commit_now > self.served:
            self.served = orders.commit_now
            if self.plan is not None and self.plan.rank0.key == self.key:
                self.checkpoint()
        if orders.stop_reason is not None:
            self.leave(orders.stop_reason)

    def form(self, plan: Plan) -> None:
        member = plan.find(self.key)
        if self.plan is not None and plan.generation <= self.plan.generation:
            return
        self.plan, self.may_train, self.stepped = plan, False, False
        if member is None:
            return
        self.ledger.recover("group")
        if plan.restore and member.rank == 0:
            self.committed.write(self.saved.read() or 0)
            self.restored.write(plan.generation)
        deadline_s = time.monotonic() + RESTORE_S
        while plan.restore and (self.restored.read() or 0) < plan.generation:
            if time.monotonic() > deadline_s:
                return  # rank 0 is gone; a newer plan will come
            time.sleep(0.001)
        iteration = self.committed.read() or 0
        self.reported, self.formed = iteration, plan.generation
        self.send(
            messages.Formed(
                key=self.key,
                generation=plan.generation,
                state_hash=state_hash(iteration),
                source=plan.rank0.key,
                iteration=iteration,
                rolled_back=False,
                seconds={"release": 0.0, "group": 0.001, "sync": 0.001, "envs": 0.0},
                at_s=time.monotonic(),
            )
        )
        self.begin()

    def begin(self) -> None:
        """The newest plan is marked formed: checkpoint first where asked, then train."""
        plan = self.plan
        if plan is None or self.formed != plan.generation or self.marked < plan.generation:
            return
        self.ledger.switch("hold" if plan.hold else "rollout")
        if plan.commit_first and plan.rank0.key == self.key:
            self.ask += 1
            self.send(
                messages.AskCommit(
                    key=self.key,
                    ask=self.ask,
                    generation=plan.generation,
                    iteration=self.reported,
                )
            )
        elif not plan.hold:
            self.may_train = True

    def step(self) -> None:
        plan = self.plan
        assert plan is not None
        member = plan.find(self.key)
        if member is None or plan.hold:
            return
        iteration = self.reported + 1
        if self.collecting != iteration:
            self.collecting = iteration
            self.page.put(phase=PHASES.index("rollout"))
            self.page.add("collected_env_steps", self.steps(len(member.blocks)))
        self.fault("rollout", iteration)
        if not self.stepped:
            self.stepped = True
            self.send(
                messages.Stepped(key=self.key, generation=plan.generation, at_s=time.monotonic())
            )
        self.arrived[self.key.slot].write(iteration)
        if member.rank == 0:
            if any((self.arrived[m.key.slot].read() or 0) < iteration for m in plan.members):
                return
            self.committed.write(iteration)
        elif (self.committed.read() or 0) < iteration:
            return
        self.commit(plan, iteration)

    def commit(self, plan: Plan, iteration: int) -> None:
        self.reported = iteration
        ranks = tuple(
            messages.RankRecord(key=m.key, blocks=m.blocks, env_steps=self.steps(len(m.blocks)))
            for m in plan.members
        )
        total = sum(rank.env_steps for rank in ranks)
        self.send(
            messages.Committed(
                key=self.key,
                generation=plan.generation,
                iteration=iteration,
                env_steps_total=iteration * total,
                state_hash=state_hash(iteration),
                ranks=ranks,
                metrics={"episode_return_mean": float(iteration), "reward_mean": 0.5},
                activity=self.ledger.take()[0],
            )
        )
        end = self.config.job.iterations
        if end is not None and iteration >= end:
            self.leave("finished")

    def checkpoint(self) -> None:
        plan = self.plan
        assert plan is not None
        self.saved.write(self.reported)
        self.send(
            messages.CheckpointDone(
                key=self.key,
                generation=plan.generation,
                iteration=self.reported,
                path=f"fake/{self.reported}",
                stall_s=0.001,
                persist_s=0.002,
                size_bytes=100,
            )
        )

    def leave(self, reason: str) -> None:
        self.ledger.switch("drain")
        plan = self.plan
        if reason in ("stopped", "finished") and plan is not None and plan.rank0.key == self.key:
            self.checkpoint()
        self.send(
            messages.Leaving(
                key=self.key,
                generation=0 if plan is None else plan.generation,
                iteration=self.reported,
                reason=reason,
            )
        )
        self.link.flush(2.0)
        sys.exit(0)

    def steps(self, blocks: int) -> int:
        return blocks * self.config.env.block * self.config.ppo.rollout_steps

    def fault(self, point: str, iteration: int) -> None:
        for action, slot, incarnation, first in self.options.get("faults", []):
            early = first == 0
            if (slot, incarnation) != (self.key.slot, self.key.incarnation):
                continue
            if early != (point == "early") or iteration < first:
                continue
            match action:
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hang":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "exit":
                    print("about to exit with code 3")
                    sys.exit(3)
                case "cold":
                    sys.exit(EXIT_RESTART_COLD)
                case "garbage":
                    assert self.link._socket is not None
                    self.link._socket.sendall(b"\xff" * 64)
                case "lie":
                    self.send(
                        messages.Formed(
                            key=self.key,
                            generation=1,
                            state_hash="lie",
                            source=self.key,
                            iteration=10**6,
                            rolled_back=False,
                            seconds={},
                            at_s=time.monotonic(),
                        )
                    )
                    time.sleep(LIE_S)
                case "raise":
                    self.send(
                        messages.Fault(
                            key=self.key,
                            generation=self.formed,
                            iteration=iteration,
                            fingerprint="builtins.ValueError at fake.py:1",
                            traceback="Traceback: a fake error",
                        )
                    )
                    self.link.flush(2.0)
                    sys.exit(70)

    def send(self, message: messages.WorkerMessage) -> None:
        self.link.send(message)


def state_hash(iteration: int) -> str:
    return hashlib.sha256(str(iteration).encode()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    options = parser.parse_args()
    key = WorkerKey(options.node, options.slot, options.incarnation)
    FakeWorker(RunDir(options.dir), key).run()


if __name__ == "__main__":
    main()
