"""The worker process of one slot: wiring, warm-up, training, and leaving in words.

Started by the supervisor as ``python -m rallypoint.trainer.worker``; everything else it needs is in
the run's directory. Exit codes: `rallypoint.daemon.shared.exitcodes`.
"""

import argparse
import faulthandler
import functools
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from rallypoint import __version__
from rallypoint.daemon.shared import messages, timeouts
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.configload import config_hash, from_json
from rallypoint.daemon.shared.exitcodes import (
    EXIT_ABANDONED,
    EXIT_FAULT,
    EXIT_OUT_OF_MEMORY,
    EXIT_RESTART_COLD,
)
from rallypoint.daemon.shared.failpoints import Failpoints
from rallypoint.daemon.shared.plan import WorkerKey
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.daemon.shared.slotpage import SlotPage
from rallypoint.daemon.shared.stages import write_stage
from rallypoint.trainer.checkpoints import CheckpointKeeper
from rallypoint.trainer.elastic.collectives import SingleProcess
from rallypoint.trainer.elastic.envrows import EnvRows, register_env
from rallypoint.trainer.elastic.group import ProcessGroup
from rallypoint.trainer.elastic.link import Link
from rallypoint.trainer.elastic.presence import Presence
from rallypoint.trainer.elastic.registry import StateRegistry
from rallypoint.trainer.elastic.rowsfile import RowsFiles
from rallypoint.trainer.elastic.session import ElasticSession
from rallypoint.trainer.elastic.state import TrainingState
from rallypoint.trainer.envs.base import PreparedEnv, VecEnv
from rallypoint.trainer.envs.factory import expected_envs, make_env
from rallypoint.trainer.errors import Left, RestartCold, is_out_of_memory
from rallypoint.trainer.learners import learner_type
from rallypoint.trainer.loop import TrainingLoop
from rallypoint.trainer.ppo import DTYPES, PpoLearner
from rallypoint.trainer.regrow import Regrow, noted
from rallypoint.trainer.restoring import Restorer
from rallypoint.trainer.rollout import Rollout

_FLUSH_S = 2.0


class Worker:
    """Everything that one worker process holds."""

    learner_type: type[PpoLearner] | None = None
    """None: the one that the configuration asks for."""

    def __init__(self, rundir: RunDir, key: WorkerKey) -> None:
        self.key = key
        self.rundir = rundir
        self.config = config = from_json(rundir.config.read_bytes())
        if config.ppo.reduction == "ordered":
            torch.set_num_threads(1)  # the order of sums inside a kernel depends on it
        self.page = SlotPage(rundir.page(key.slot))
        self.page.put(incarnation=key.incarnation)
        self.failpoints = Failpoints.from_environment()
        self.timeouts = timeouts.derive(config, config.job.max_workers or config.node.workers)
        self.device = _device(config, key.slot)
        self.asked_envs = max(expected_envs(config), noted(rundir.envs(key.slot)))
        self.env = self._build_env()
        kind = self.learner_type or learner_type(config)
        self.learner = kind(config, self.env.spec, self.device)
        presence = Presence(self.page)
        registry = StateRegistry()
        self.learner.register(registry)
        register_env(registry, self.env)
        backup = RowsFiles(rundir.slots, key.slot) if config.env.backup == "node" else None
        self.rows = EnvRows(self.env, registry, self.learner.on_assign, config.env.block, backup)
        self.session: ElasticSession[Rollout] = ElasticSession(
            key,
            TrainingState(registry),
            self.page,
            self.timeouts,
            self.failpoints,
            config,
            ProcessGroup(self.timeouts, self.device, _end_stuck, presence.collective),
            presence,
        )
        self.link = Link(
            rundir.control_socket,
            _hello(key, config_hash(config)),
            orphan_grace_s=self.timeouts.orphan_grace_s,
            on_plan=self.session.on_plan,
            on_abandoned=_leave_at_once,
        )
        self.session.attach(self.link)
        if isinstance(self.env, PreparedEnv):
            self.session.prepare = functools.partial(_prepare, self.env, config.env.block)
        self.checkpoints = CheckpointKeeper(
            config,
            str(rundir.path / "checkpoints"),
            self.session,
            self.failpoints,
            self.timeouts.answer_s,
            backup,
        )
        self.restorer = Restorer(
            config,
            [tier.store for tier in self.checkpoints.tiers],
            self.session,
            backup if config.checkpoint.env_rows else None,
            self.timeouts.holder_wait_s,
        )
        self.store, self.port = _bind_store(config.node.bind)

    def _build_env(self) -> VecEnv:
        """The env, whose simulator is built for as many as this worker will probably hold."""
        return make_env(
            self.config,
            dtype=DTYPES[self.config.ppo.dtype],
            device=self.device,
            num_envs=self.asked_envs,
            process=f"{self.key.node}/{self.key.slot}",
            on_stage=self._say_stage,
        )

    def _say_stage(self, stage: str) -> None:
        write_stage(self.rundir.stage(self.key.slot), self.key.incarnation, stage)

    def warm_up(self) -> None:
        """One small iteration through the real code, undone afterwards: env, kernels, optimiser,
        process group and its first name look-up are paid for before this worker says ready."""
        session, learner, config = self.session, self.learner, self.config
        self.session.set_phase("warming")
        self.link.send(messages.Progress(key=self.key, stage="warming up"))
        self.failpoints.hit("warm_up", rank=self.key.slot)
        ids = np.arange(_warm_up_envs(config, self.env), dtype=np.int64)
        self.env.assign(ids, iteration=0)
        learner.on_assign(ids)
        rollout = learner.collect(self.env, 0, on_step=lambda _: None)
        store = PrefixStore("warm-up", self.store)
        session.group.form(
            store, generation=0, rank=0, world_size=1, timeout_s=self.timeouts.collective_s
        )
        session.state.dirty = True
        wrapped = session.group.wrap(learner.module)
        learner.update(rollout, SingleProcess(), wrapped, 0, lambda: None)
        session.group.unwrap(wrapped)
        learner.merge([learner.pack(rollout)])
        session.group.close()
        session.group.meter.take()  # its collectives are none of the job's
        session.state.roll_back()
        none = np.zeros(0, dtype=np.int64)
        self.env.assign(none, iteration=0)
        learner.on_assign(none)
        self.page.put(env_builds=self.env.builds)

    def say_ready(self) -> None:
        """From now on this worker can be planned in."""
        session = self.session
        session.checkpoint = self.restorer.newest_verified()
        self.failpoints.hit("ready", rank=self.key.slot)
        session.set_phase("ready")
        self.link.send(
            messages.Ready(
                key=self.key,
                host=self.config.node.advertise,
                port=self.port,
                device=_identity(self.device),
                capacity_envs=self.env.capacity_envs or self.config.env.max_envs or 0,
                last_formed=session.state.last_formed,
                checkpoint=session.checkpoint,
            )
        )

    def train(self) -> None:
        """Train until this worker leaves (`Left`), or an error of the program."""
        regrow = None
        if self.env.spec.capabilities.resize == "restart":
            note = self.rundir.envs(self.key.slot)
            regrow = Regrow(self.key, self.config.env, note, asked=self.asked_envs, boot_s=_age_s())
        TrainingLoop(
            self.config, self.session, self.learner, self.env, self.rows, self.checkpoints, regrow
        ).run()

    def say_leaving(self, reason: str) -> None:
        """Last words of a worker that leaves by agreement."""
        self.session.set_phase("leaving")
        self.link.send(
            messages.Leaving(
                key=self.key,
                generation=self.session.generation,
                iteration=self.session.state.committed,
                reason=reason,
            )
        )
        self.link.flush(_FLUSH_S)

    def say_fault(self, error: BaseException) -> None:
        """Last words of a worker whose program raised."""
        session = self.session
        fault = _fault(self.key, error, session.generation, session.state.committed + 1)
        self.link.send(fault)
        self.link.flush(_FLUSH_S)


def _prepare(env: PreparedEnv, block: int, blocks: int) -> bool:
    return env.prepare(block * blocks)


def _warm_up_envs(config: Config, env: VecEnv) -> int:
    """One env block; or, where another count would be another simulator, all that are expected."""
    block = config.env.block
    if env.spec.capabilities.resize == "exact":
        return block
    expected = expected_envs(config)
    return min(expected, env.capacity_envs or expected) // block * block


def fingerprint(error: BaseException) -> str:
    """The same for the same error on every rank: type, and the innermost frame's file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "nowhere"
    return f"{type(error).__module__}.{type(error).__qualname__} at {where}"


def _fault(key: WorkerKey, error: BaseException, generation: int, iteration: int) -> messages.Fault:
    return messages.Fault(
        key=key,
        generation=generation,
        iteration=iteration,
        fingerprint=fingerprint(error),
        traceback="".join(traceback.format_exception(error)),
    )


def _say_never_built(rundir: RunDir, key: WorkerKey, error: Exception) -> None:
    """Last words of a worker that could not be built, over a link of its own: without them its slot
    would be started again and again for an error of the program."""
    config = from_json(rundir.config.read_bytes())
    link = Link(
        rundir.control_socket,
        _hello(key, config_hash(config)),
        orphan_grace_s=config.membership.orphan_grace_s,
        on_plan=lambda plan: None,
        on_abandoned=_leave_at_once,
    )
    link.send(_fault(key, error, generation=0, iteration=1))
    link.start()
    link.flush(_FLUSH_S)


def _hello(key: WorkerKey, configuration: str) -> messages.Hello:
    return messages.Hello(
        key=key,
        pid=os.getpid(),
        start_ticks=start_ticks("self"),
        versions={"rallypoint": __version__, "torch": str(torch.__version__)},
        config_hash=configuration,
    )


def start_ticks(pid: int | str) -> int:
    """Start time of a process in clock ticks since boot."""
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def _age_s() -> float:
    """How long this process has lived."""
    began_s = start_ticks("self") / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s


def _bind_store(bind: str) -> tuple[TCPStore, int]:
    """The store server of this worker, for life, bound to one address; used while it is rank 0."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((bind, 0))
    listener.listen(1024)
    port: int = listener.getsockname()[1]
    store = TCPStore(
        bind,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def _device(config: Config, slot: int) -> torch.device:
    """The device of a slot; the process uses no other GPU."""
    if config.node.devices is None:
        return torch.device("cpu")
    device = torch.device("cuda", config.node.devices[slot])
    torch.cuda.set_device(device)
    return device


def _identity(device: torch.device) -> str:
    """``cpu``, or what distinguishes this GPU from every other one."""
    if device.type == "cpu":
        return "cpu"
    return f"gpu-{torch.cuda.get_device_properties(device).uuid}"


def _end_stuck(why: str) -> None:
    sys.stderr.write(f"{why}: ending this process; its slot restarts cold\n")
    sys.stderr.flush()
    os._exit(EXIT_RESTART_COLD)


def _leave_at_once() -> None:
    # The main thread is stuck where it cannot see that the grace is over.
    sys.stderr.write("no supervisor for twice the orphan grace: leaving at once\n")
    sys.stderr.flush()
    os._exit(EXIT_ABANDONED)


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    # A worker without its link or its forming thread would sit there deaf: end it, with the reason.
    traceback.print_exception(failure.exc_value)
    sys.stderr.flush()
    os._exit(EXIT_FAULT)


def main(arguments: Sequence[str] | None = None, *, worker_type: type[Worker] = Worker) -> int:
    """Run one worker; the exit code."""
    parser = argparse.ArgumentParser(prog="rallypoint-worker")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    threading.excepthook = _thread_failed
    key = WorkerKey(options.node, options.slot, options.incarnation)
    rundir = RunDir(options.dir)
    try:
        worker = worker_type(rundir, key)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported, and stands in the log
        traceback.print_exc()
        if is_out_of_memory(error):
            return EXIT_OUT_OF_MEMORY
        _say_never_built(rundir, key, error)
        return EXIT_FAULT
    # Slurm and others signal every process of a job: the supervisor alone decides when a worker ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stacks = rundir.stacks(key.slot).open("w")  # kept open: the handler writes into it
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    worker.link.start()
    try:
        worker.warm_up()
        worker.say_ready()
        worker.train()
    except Left as reason:
        worker.say_leaving(str(reason))
        return 0
    except RestartCold as error:
        worker.say_fault(error)
        return EXIT_RESTART_COLD
    except Exception as error:  # noqa: BLE001 - the last frame: everything is reported, then raised to the log
        traceback.print_exc()
        if is_out_of_memory(error):
            return EXIT_OUT_OF_MEMORY
        worker.say_fault(error)
        return EXIT_FAULT
    return 0


if __name__ == "__main__":
    # Threads of libraries must not hold up the exit of a worker that has said its last words.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
