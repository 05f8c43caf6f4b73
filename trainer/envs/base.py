"""The env Protocol: what every simulator backend gives the trainer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CPU: Final = torch.device("cpu")


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do when env counts change."""

    resize: Literal["exact", "rebuild", "restart"]
    """exact: rows that stay go on untouched; rebuild: the simulator is made anew in this process, and
    episodes are cut where `carry_state` does not hold; restart: it is made once in a process, for the
    envs that this will hold, of which some may be idle."""
    carry_state: bool
    """Env rows can be read out and put into another process."""
    final_obs: bool
    """`StepResult.final_obs` holds the true last observation of ended episodes."""
    deterministic_split: bool
    """With given actions, any split of the same env ids gives bit-identical results."""
    multi_instance: bool = False
    """One process can hold several simulators, so that the next one is built while this one steps."""


@dataclass(frozen=True)
class MotionLibrary:
    """The clips that a task follows, and their bins: runs of frames, in the order of clips."""

    clips: tuple[str, ...]
    """Names, unique; the key of what is known about a clip in a checkpoint."""
    bin_frames: tuple[tuple[int, ...], ...]
    """Length of each bin of each clip, in frames of one env step."""

    @property
    def clip_of_bin(self) -> tuple[int, ...]:
        """The clip, as an index into `clips`, of each bin of the library."""
        return tuple(c for c, frames in enumerate(self.bin_frames) for _ in frames)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of each bin of the library, in frames."""
        return tuple(length for frames in self.bin_frames for length in frames)


@dataclass(frozen=True)
class EnvSpec:
    """What is fixed about a task."""

    task: str
    obs_dims: Mapping[str, int]
    """Observation groups: ``actor`` always, ``critic`` where it sees more than the actor."""
    action_dim: int
    max_episode_steps: int
    step_dt_s: float
    capabilities: Capabilities
    action_bound: float | None = None
    """The env clips every action to this far from 0. None: it takes them as they are."""
    action_names: tuple[str, ...] = ()
    """What each action drives; () where nothing has names."""
    library: MotionLibrary | None = None
    """What episodes follow, where the env is a `MotionEnv`."""
    device: torch.device = CPU
    """Where the tensors of a `StepResult` are."""


def _nobody(stage: str) -> None:
    """Listens to no stage."""


@dataclass(frozen=True)
class EnvRequest:
    """What a backend is asked for: ``[env]`` as far as it concerns the simulator."""

    task: str
    seed: int
    dtype: torch.dtype = torch.float32
    """Of observations and rewards."""
    device: torch.device = CPU
    """The device of the slot; a backend may step elsewhere, and says so in `EnvSpec.device`."""
    num_envs: int = 8
    """How many envs this process will probably hold: what takes long to build is built for these."""
    max_envs: int | None = None
    """Most envs that it may hold; None: no bound is known."""
    rollout_steps: int = 0
    """Steps of each env in one iteration; 0: nobody knows."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values by name, from ``env.overrides``. A backend refuses those that it does not know."""
    process: str = ""
    """Which process of the job this is, node and slot: for what a simulator draws once, for no env in
    particular, which should differ between workers and stay with a worker that is replaced."""
    on_stage: Callable[[str], None] = _nobody
    """A backend that is slow to build says here what it does now, and "" when it is done, for
    ``rallypoint status``."""


@dataclass(frozen=True)
class StepResult:
    """One step of N envs, in the order of `VecEnv.env_ids`. Tensors are fresh: never reused later."""

    obs: dict[str, Tensor]
    """Observation groups, ``[N, D]``; already of the next episode where one ended."""
    reward: Tensor
    """``[N]``."""
    terminated: Tensor
    """``[N]`` bool: the episode ended by the task's own rule."""
    truncated: Tensor
    """``[N]`` bool: it ended by the time limit. Termination wins where both hold."""
    figures: dict[str, Tensor] = field(default_factory=dict)
    """Per-env figures of this step, ``[N]`` float64 (``velocity_error_m_s`` and the like); the same
    names on every step."""
    reward_terms: dict[str, Tensor] = field(default_factory=dict)
    """What the reward is the sum of, by name, ``[N]`` float64; the same names on every step."""
    final_obs: dict[str, Tensor] | None = None
    bins: Tensor | None = None
    """``[N]`` int64: the bin of the motion library that this step was in, before any reset. None: not
    a `MotionEnv`."""
    endings: dict[str, Tensor] = field(default_factory=dict)
    """What is known of the episodes that this step ended, by name, ``[N]`` float64, and 0 in all other
    rows; the same names on every step."""


class VecEnv(Protocol):
    """N envs with global ids. Every random draw is keyed by (seed, purpose, global env id, iteration,
    step in rollout), so that results do not depend on how ids are spread over processes."""

    @property
    def spec(self) -> EnvSpec: ...

    @property
    def env_ids(self) -> NDArray[np.int64]:
        """Global ids of the rows, ascending, ``[N]``."""
        ...

    @property
    def builds(self) -> int:
        """How often the simulator was built in this process."""
        ...

    @property
    def capacity_envs(self) -> int | None:
        """Most envs that this process can hold, as far as is known; None: no bound is known."""
        ...

    def assign(self, env_ids: NDArray[np.int64], *, iteration: int) -> NDArray[np.int64]:
        """Own exactly these envs from now on; the ids, ascending, that begin an episode by this. Rows
        that stay go on untouched (``exact``), or where the simulator need not be built anew; new
        ones start an episode, drawn for this iteration. No ids at all is allowed.

        Raises `EnvCapacityError` when there are more than the process can hold; it then owns what it
        owned before, in new episodes where the simulator had to be built again."""
        ...

    def begin_rollout(self, iteration: int) -> dict[str, Tensor]:
        """Key the draws that follow by this iteration, step 0; the present observations."""
        ...

    def step(self, actions: Tensor) -> StepResult:
        """One control step with actions ``[N, A]``; the step in the rollout advances by one."""
        ...

    def rows(self) -> dict[str, NDArray[np.float64]]:
        """All per-env state, ``[N, ...]`` each, in the order of `env_ids`."""
        ...

    def load_rows(
        self, env_ids: NDArray[np.int64], rows: Mapping[str, NDArray[np.float64]]
    ) -> None:
        """Put rows that `rows` gave into these envs, which must be owned."""
        ...

    def close(self) -> None:
        """Release the simulator. Nothing else is called afterwards; a second time does nothing."""
        ...


Backend = Callable[[EnvRequest], VecEnv]
"""What ``env.backend`` names: makes an env that holds no envs yet. Raises `EnvError` for a task or an
override that it does not know."""


@runtime_checkable
class PreparedEnv(VecEnv, Protocol):
    """An env that can build its next simulator while the present one steps."""

    def prepare(self, count: int) -> bool:
        """Whether `assign` of this many envs has nothing left to build that could be built beforehand.
        Begins to, beside the present simulator, and returns at once."""
        ...


@runtime_checkable
class AdaptiveEnv(VecEnv, Protocol):
    """An env that grows harder with what the job has learned. Its curriculum is training state: the same on
    every rank, in every hash and checkpoint, and newcomers receive it."""

    @property
    def curriculum(self) -> Mapping[str, Tensor]:
        """Live tensors by name, the same objects for as long as the env lives; empty: there is none.
        Read by the env where a rollout begins and where episodes do."""
        ...

    def advance(self, figures: Mapping[str, float]) -> None:
        """Write the curriculum of the next iteration, from the present one's global figures, which are the
        same on every rank. Called once for each committed iteration."""
        ...


@dataclass(frozen=True)
class Scene:
    """How an env can be drawn: a MuJoCo model that its rows are put into."""

    mjcf: str
    distance_m: float
    """A good distance for a camera."""
    follows: bool
    """The camera goes along with the first body."""


@runtime_checkable
class DrawnEnv(VecEnv, Protocol):
    """An env that can be drawn."""

    @property
    def scene(self) -> Scene: ...

    def positions(self) -> NDArray[np.float64]:
        """Generalised positions of the scene's model, ``[N, nq]``, fresh, in the order of `env_ids`."""
        ...


@runtime_checkable
class MotionEnv(VecEnv, Protocol):
    """An env whose episodes follow clips of `EnvSpec.library`, drawn by the bin they start in. Its steps
    say their `StepResult.bins`."""

    def set_probabilities(self, probabilities: NDArray[np.float64]) -> None:
        """How often an episode starts in each bin, ``[B]``, from now on; at first by frames alone."""
        ...

    def start_clips(self, clips: NDArray[np.int64]) -> dict[str, Tensor]:
        """Start an episode at frame 0 of these clips, ``[N]``, one per row, as the first thing in a
        rollout; the observations."""
        ...
