"""Where everything of a run lies: one directory, known to the supervisor, workers and commands."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.plan import WorkerKey

_HALF_A_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/(?!/)")


@dataclass(frozen=True)
class RunDir:
    """Paths below ``DIR``."""

    path: Path

    @property
    def lock(self) -> Path:
        return self.path / "supervisor.lock"

    @property
    def state(self) -> Path:
        return self.path / "state.json"

    @property
    def config(self) -> Path:
        """The configuration that workers read."""
        return self.path / "config.json"

    @property
    def workers(self) -> Path:
        """Process ids and start times of the workers that may be alive."""
        return self.path / "workers.json"

    @property
    def books(self) -> Path:
        """What the supervisor has counted; survives its SIGKILL."""
        return self.path / "books.page"

    @property
    def notices(self) -> Path:
        """Deadlines of the preemption notices that were seen."""
        return self.path / "notices.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def curve(self) -> Path:
        return self.path / "curve.png"

    @property
    def curves(self) -> Path:
        """Event files of TensorBoard."""
        return self.path / "curves"

    @property
    def wandb(self) -> Path:
        """How far Weights & Biases has been fed, and its own files."""
        return self.path / "wandb"

    @property
    def wandb_log(self) -> Path:
        """What the feed of Weights & Biases prints."""
        return self.wandb / "feed.log"

    @property
    def control_socket(self) -> Path:
        """Supervisor and workers."""
        return self.path / "control.sock"

    @property
    def admin_socket(self) -> Path:
        """Commands and supervisor."""
        return self.path / "admin.sock"

    def page(self, slot: int) -> Path:
        """The counters of a slot, which survive its worker."""
        return self.path / "slots" / f"{slot}.page"

    @property
    def slots(self) -> Path:
        """Files of the slots, which survive their workers: counters, stacks, env rows."""
        return self.path / "slots"

    def envs(self, slot: int) -> Path:
        """How many envs the next life of a slot should build its simulator for."""
        return self.path / "slots" / f"{slot}.envs"

    def stage(self, slot: int) -> Path:
        """What the worker in a slot is building, in words."""
        return self.path / "slots" / f"{slot}.stage"

    def stacks(self, slot: int) -> Path:
        """Python stacks that the worker in a slot writes when it is asked to by SIGUSR1."""
        return self.path / "slots" / f"{slot}.stacks"

    @property
    def evidence(self) -> Path:
        """What was saved of workers that hung, a directory for each."""
        return self.path / "evidence"

    def worker_log(self, key: WorkerKey) -> Path:
        """Standard output and error of one life of a worker."""
        return self.path / "logs" / f"worker-{key.slot}-{key.incarnation}.log"

    @property
    def fork_server_log(self) -> Path:
        """Output of the fork server: empty, unless something is wrong with it."""
        return self.path / "logs" / "forkserver.log"

    def checkpoints(self, config: Config) -> Path:
        """Local directory of checkpoints: ``[checkpoint] url`` where that is one, else ours."""
        url = config.checkpoint.url
        if url is None or is_remote(url):
            return self.path / "checkpoints"
        return Path(url.removeprefix("file://"))


def is_remote(url: str) -> bool:
    """Whether checkpoints there are reached by a backend: not a path, nor a ``file://`` URL of one."""
    return "://" in url and not url.startswith("file:///")


def looks_like_url(path: str) -> bool:
    """Whether a path is a URL whose second slash was forgotten: nobody wants a directory ``s3:``."""
    return _HALF_A_URL.match(path) is not None


def half_a_url(path: str) -> str:
    """What to say of one."""
    scheme = path.partition(":")[0]
    return (
        f"{scheme}:/… is neither a path nor a URL: a URL begins with {scheme}://; a directory of that name "
        f"is ./{scheme}:"
    )
