"""The PPO learner: what the worker's loop drives, iteration by iteration."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rallypoint.daemon.shared.config import Config
from rallypoint.trainer import figures
from rallypoint.trainer.elastic.collectives import Collectives, SingleProcess
from rallypoint.trainer.elastic.registry import Scope, StateRegistry
from rallypoint.trainer.envs.base import EnvSpec, MotionEnv, VecEnv
from rallypoint.trainer.episodes import EpisodeTracker
from rallypoint.trainer.errors import TrainerError
from rallypoint.trainer.figures import Layout, Measured
from rallypoint.trainer.latent import LatentActorCritic, totals
from rallypoint.trainer.motion_sampler import MotionSampler
from rallypoint.trainer.networks import ActorCritic
from rallypoint.trainer.normaliser import Normaliser
from rallypoint.trainer.optimiser import Adam
from rallypoint.trainer.ordered import RankReduction, Reduction
from rallypoint.trainer.policies.policy import DeployedPolicy
from rallypoint.trainer.rng import Purpose, policy_noise, uniform
from rallypoint.trainer.rollout import Advice, Rollout, collect
from rallypoint.trainer.update import PpoUpdate

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}
"""Number types that ``[ppo] dtype`` names."""


class PpoLearner:
    """Policy, optimiser and statistics of one worker.

    All state that outlives an iteration is in tensors that `register` hands to the state registry,
    written in place; the running episode sums, keyed by env id, are the worker's own.
    """

    def __init__(self, config: Config, spec: EnvSpec, device: torch.device) -> None:
        ppo = config.ppo
        self._seed = config.job.seed
        self._ppo = ppo
        self._aux = config.aux
        self._block = config.env.block
        self._spec = spec
        self._device = device
        self._dtype = DTYPES[ppo.dtype]
        with torch.random.fork_rng(devices=[]):  # the same start on every rank
            torch.manual_seed(config.job.seed)
            sizes = spec.obs_dims, spec.action_dim, ppo
            latent = config.aux.latent
            module = ActorCritic(*sizes) if latent is None else LatentActorCritic(*sizes, latent)
        self.module = module.to(device, self._dtype)
        self._optimiser = Adam(self.module.named_parameters(), ppo.learning_rate)
        self._normaliser = Normaliser(spec.obs_dims, ppo, device)
        self._episodes = EpisodeTracker(device)
        self._update = PpoUpdate(self.module, self._optimiser, self._normaliser, config)
        self._reduction: Reduction = RankReduction(SingleProcess(), self.module)
        self._measured: Sequence[Measured] = (Measured(),)
        library = spec.library
        self.sampler = None if library is None else MotionSampler(config.sampler, library)
        self._bins = 0 if library is None else len(library.lengths)
        self._layout = Layout(self._normaliser.dims, (), self._bins)

    @property
    def moment_values(self) -> int:
        """Numbers in the moments of a mini-batch's observations; 0 where nobody gathers them."""
        if self._ppo.normaliser_update == "iteration":
            return 0
        return sum(1 + 2 * size for size in self._normaliser.dims.values())

    def _privileged(self, env_ids: NDArray[np.int64], iteration: int) -> Tensor | None:
        """Envs in which the privileged encoder drives, ``[N]`` bool, where there is one."""
        if self._aux.latent is None:
            return None
        draws = uniform(self._seed, Purpose.ENCODER, env_ids, iteration, 0, 1)[:, 0]
        return torch.from_numpy(draws < self._aux.privileged_share).to(self._device)

    def _advice(self, env_ids: NDArray[np.int64], iteration: int) -> Advice | None:
        """The teacher of a student."""
        return None

    def frozen_tensors(self) -> dict[str, Tensor]:
        """What the mean policy is made of: parameters and statistics of observations."""
        model = {f"model/{name}": p for name, p in self.module.named_parameters()}
        scale = {f"normaliser/{name}": t for name, t in self._normaliser.tensors().items()}
        return {**model, **scale}

    def deployed(self) -> DeployedPolicy:
        """A copy of what a robot needs: raw observations to the actions that the env applies."""
        scaling = self._normaliser.scaling(torch.float32)
        return DeployedPolicy(self.module, scaling, self._spec.action_bound)

    def register(self, registry: StateRegistry) -> None:
        """Register all state: ``model``, ``optimiser`` (learning rate included), ``normaliser``, for
        tasks that follow motions ``sampler``, and per env ``episodes``."""
        registry.register("model", Scope.REPLICATED, lambda: dict(self.module.named_parameters()))
        registry.register("optimiser", Scope.REPLICATED, self._optimiser.tensors)
        registry.register("normaliser", Scope.GLOBAL, self._normaliser.tensors)
        registry.register_rows("episodes", self._episodes.rows, self._episodes.load_rows)
        if self.sampler is not None:
            registry.register("sampler", Scope.GLOBAL, self.sampler.tensors)

    def set_up(self, env: VecEnv) -> None:
        """Give the env what stands still within an iteration: how often each motion is drawn. Before
        `VecEnv.assign`, which starts episodes."""
        if self.sampler is not None and isinstance(env, MotionEnv):
            env.set_probabilities(self.sampler.probabilities().numpy())

    def on_assign(self, env_ids: NDArray[np.int64]) -> None:
        """The env owns exactly these from now on: running episodes of those that stay go on."""
        self._episodes.assign(env_ids)

    def collect(self, env: VecEnv, iteration: int, *, on_step: Callable[[int], None]) -> Rollout:
        """Run the env for T steps; no collective is needed. ``on_step(t)`` is called after each env
        step and may raise, which ends the rollout there.

        Raises `TrainerError` when `on_assign` was not told of the env's ids, `EnvError` when the env
        breaks its contract."""
        if not np.array_equal(env.env_ids, self._episodes.env_ids):
            raise TrainerError(
                f"the env owns {len(env.env_ids)} envs, but the learner was assigned "
                f"{len(self._episodes.env_ids)} (or other ones); call on_assign after env.assign"
            )
        self.set_up(env)
        noise = policy_noise(
            self._seed,
            env.env_ids,
            iteration,
            self._ppo.rollout_steps,
            self._spec.action_dim,
            self._dtype,
        )
        rollout = collect(
            self.module,
            self._normaliser,
            self._episodes,
            env,
            noise.to(self._device),
            iteration=iteration,
            block=self._block,
            block_moments=self._ppo.reduction == "ordered",
            final_obs=self._ppo.time_out_bootstrap == "final_obs",
            raw_obs=self._ppo.normaliser_update == "sonic_epochs",
            advice=self._advice(env.env_ids, iteration),
            privileged=self._privileged(env.env_ids, iteration),
            on_step=on_step,
        )
        self._layout = Layout(
            self._normaliser.dims,
            tuple(rollout.figures),
            self._bins,
            tuple(rollout.episode_terms),
            self._update.extra_figures,
        )
        return rollout

    def update(
        self,
        rollout: Rollout,
        collectives: Collectives,
        module: nn.Module,
        iteration: int,
        on_optimiser_step: Callable[[], None],
    ) -> None:
        """E * M optimiser steps on the rollouts of all ranks; ``module`` is `module` as
        `Collectives.replicated` wraps it. ``on_optimiser_step()`` is called after each step.

        Raises what the collectives raise (`GroupBroken`); it may be run again on the same rollout
        once the state is back where it was."""
        self._reduction, self._measured = self._update.run(
            rollout, collectives, module, iteration, on_optimiser_step
        )

    def pack(self, rollout: Rollout) -> Tensor:
        """This rank's record for the last collective: statistics deltas and sums of figures, float64
        ``[R]``. Depends only on the rollout and on what the last `update` measured."""
        shards = zip(self._reduction.shards(rollout), self._measured, strict=True)
        return self._reduction.pack([figures.pack(self._layout, *shard) for shard in shards])

    def merge(self, records: Sequence[Tensor]) -> dict[str, float]:
        """Merge the records that all ranks packed, in rank order, into the global statistics, once per
        iteration. The iteration's figures: global means; one without a sample anywhere is absent."""
        here = self._reduction.unpack([r.to(self._device) for r in records])
        deltas, merged = figures.unpack(self._layout, here)
        if self._ppo.normaliser_update == "iteration":  # else the update has done it
            for group, delta in deltas.items():
                self._normaliser.merge(group, delta)
        if self.sampler is not None:
            counts = figures.unpack_bins(self._layout, here)
            self.sampler.merge(counts, world_size=len(records))
            merged |= self.sampler.figures()
        merged["learning_rate"] = self._optimiser.learning_rate
        if self._aux.latent is not None:
            merged |= totals(self._aux, merged)
        merged["noise_std"] = self.module.std().mean().item()
        return merged

    def finite(self) -> bool:
        """Whether every parameter, moment and statistic is finite."""
        tensors = [
            *self.module.parameters(),
            *self._optimiser.tensors().values(),
            *self._normaliser.tensors().values(),
        ]
        return bool(
            torch.stack([t.detach().isfinite().all().to(self._device) for t in tensors]).all()
        )

    @torch.no_grad()
    def mean_action(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Action means ``[N, A]`` for raw observations."""
        actor_obs = obs["actor"].to(self._device, self._dtype)
        return self.module.mean(self._normaliser.scaling(self._dtype).apply("actor", actor_obs))
