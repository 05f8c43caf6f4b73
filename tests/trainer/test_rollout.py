"""What one rank collects, and the running sums of its episodes."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from rallypoint.trainer.envs.base import StepResult
from rallypoint.trainer.envs.pointmass import PointMass
from rallypoint.trainer.episodes import EpisodeTracker
from rallypoint.trainer.errors import EnvError, TrainerError
from rallypoint.trainer.ppo import PpoLearner
from rallypoint.trainer.rollout import Rollout
from tests.fakes.training import BLOCK, config, make_worker

T = 24
FIELDS = (
    "actor_obs",
    "actions",
    "mean",
    "log_prob",
    "values",
    "rewards",
    "terminated",
    "truncated",
)


def ids(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def step(tracker: EpisodeTracker, rewards: list[float], done: list[bool]) -> list[list[float]]:
    """Returns and lengths of the episodes that ended; there is one term, which is half the reward."""
    reward = torch.tensor(rewards)
    ended = tracker.step(reward, torch.tensor(done, dtype=torch.bool), {"half": reward / 2})
    assert ended.terms["half"].tolist() == [value / 2 for value in ended.returns.tolist()]
    return [ended.returns.tolist(), ended.lengths.tolist()]


def test_episode_sums_end_with_their_episode() -> None:
    tracker = EpisodeTracker(torch.device("cpu"))
    tracker.assign(ids(3, 5))
    assert step(tracker, [1.0, 2.0], [False, False]) == [[], []]
    assert step(tracker, [1.0, 2.0], [True, False]) == [[2.0], [2.0]]
    assert step(tracker, [1.0, 2.0], [True, True]) == [[1.0, 6.0], [1.0, 3.0]]


def test_envs_that_stay_keep_their_episode_and_new_ones_start_at_zero() -> None:
    tracker = EpisodeTracker(torch.device("cpu"))
    tracker.assign(ids(3, 5))
    step(tracker, [1.0, 2.0], [False, False])
    tracker.assign(ids(4, 5, 9))
    assert step(tracker, [10.0, 10.0, 10.0], [True] * 3) == [[10.0, 12.0, 10.0], [1.0, 2.0, 1.0]]
    tracker.assign(ids())
    assert step(tracker, [], []) == [[], []]
    tracker.assign(ids(5))
    assert step(tracker, [1.0], [True]) == [[1.0], [1.0]]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "shards", [((0, 1), (2, 3)), ((2,), (0, 1, 3)), ((), (0, 1, 2, 3))], ids=str
)
def test_any_split_by_whole_blocks_collects_the_same(
    dtype: str, shards: tuple[tuple[int, ...], ...]
) -> None:
    settings = config(dtype="float32" if dtype == "float32" else "float64")
    whole = make_worker(settings, range(4)).collect(1)
    for blocks in shards:
        part = make_worker(settings, blocks).collect(1)
        assert part.blocks == blocks
        columns = torch.from_numpy(np.flatnonzero(np.isin(whole.env_ids, part.env_ids)))
        for name in FIELDS:
            expected = getattr(whole, name).index_select(1, columns)
            assert torch.equal(getattr(part, name), expected), name


def test_shapes_and_counts() -> None:
    rollout = make_worker(config(), (0, 2)).collect(1)
    n = 2 * BLOCK
    assert rollout.env_steps == T * n
    assert rollout.blocks == (0, 2)
    assert rollout.actor_obs.shape == (T, n, 6)
    assert rollout.critic_obs is rollout.actor_obs
    assert rollout.actions.shape == rollout.mean.shape == (T, n, 2)
    assert rollout.last_values.shape == (n,)
    assert rollout.obs_moments["actor"].count == T * n
    assert rollout.figures.keys() == {"distance_m"}


def test_no_envs_at_all() -> None:
    rollout = make_worker(config(), ()).collect(1)
    assert (rollout.env_steps, rollout.blocks) == (0, ())
    assert rollout.actor_obs.shape == (T, 0, 6)
    assert rollout.obs_moments["actor"].count == 0
    assert rollout.figures["distance_m"].shape == (0,)


class SeesMore(PointMass):
    """Point mass with a critic group: the actor's, and ten times the actor's first entry."""

    def __init__(self) -> None:
        super().__init__(seed=1, dtype=torch.float64)
        self._spec = type(self._spec)(**{**vars(self._spec), "obs_dims": {"actor": 6, "critic": 7}})

    def _observe(self) -> dict[str, NDArray[np.float64]]:
        actor = super()._observe()["actor"]
        return {"actor": actor, "critic": np.concatenate([actor, 10 * actor[:, :1]], axis=1)}


def collect_asymmetric() -> tuple[PpoLearner, Rollout]:
    env = SeesMore()
    env.assign(np.arange(8), iteration=0)
    learner = PpoLearner(config(), env.spec, torch.device("cpu"))
    learner.on_assign(env.env_ids)
    return learner, learner.collect(env, 1, on_step=lambda t: None)


def test_a_critic_group_is_kept_and_counted_on_its_own() -> None:
    _, rollout = collect_asymmetric()
    assert rollout.critic_obs.shape == (T, 8, 7)
    actor, critic = rollout.obs_moments["actor"], rollout.obs_moments["critic"]
    torch.testing.assert_close(critic.mean[:6], actor.mean)
    torch.testing.assert_close(critic.m2[6], 100 * actor.m2[0])


def test_statistics_are_of_raw_observations_each_counted_once() -> None:
    worker = make_worker(config(), (0,))
    first = worker.collect(1)  # not normalised yet: there are no statistics
    # Not clamped either, or the comparison below would not hold.
    assert first.actor_obs.abs().max().item() < 5
    torch.testing.assert_close(
        first.obs_moments["actor"].mean,
        first.actor_obs.flatten(0, 1).mean(0),
        rtol=1e-5,  # of the variance that is taken to be 1
        atol=0,
    )
    worker.learner.merge([worker.learner.pack(first)])
    second = worker.collect(2)
    scaling_mean = worker.live()["normaliser/actor/mean"]
    variance = worker.live()["normaliser/actor/m2"] / (T * BLOCK)
    raw = second.actor_obs * (variance + 1e-5).sqrt() + scaling_mean
    torch.testing.assert_close(second.obs_moments["actor"].mean, raw.flatten(0, 1).mean(0))


def test_observations_stay_raw_when_asked() -> None:
    worker = make_worker(config(normalise_actor=False, normalise_critic=False), (0,))
    rollout = worker.collect(1)
    assert rollout.obs_moments == {}
    assert not [name for name in worker.live() if name.startswith("normaliser")]


def test_steps_are_told_in_order_and_may_end_the_rollout() -> None:
    class Enough(Exception):
        pass

    told = []

    def on_step(t: int) -> None:
        told.append(t)
        if t == 3:
            raise Enough

    worker = make_worker(config(), (0,))
    with pytest.raises(Enough):
        worker.learner.collect(worker.env, 1, on_step=on_step)
    assert told == [0, 1, 2, 3]
    assert worker.collect(1).env_steps == T * BLOCK


def test_the_learner_must_know_the_envs() -> None:
    worker = make_worker(config(), (0,))
    worker.env.assign(np.arange(16), iteration=1)
    with pytest.raises(TrainerError, match="call on_assign after"):
        worker.collect(1)


class Fickle(PointMass):
    """Changes the names of its figures."""

    def step(self, actions: Tensor) -> StepResult:
        result = super().step(actions)
        figures: Mapping[str, Tensor] = result.figures if self._rollout_step % 2 else {}
        return StepResult(
            result.obs, result.reward, result.terminated, result.truncated, dict(figures)
        )


def test_figures_that_come_and_go_are_an_error() -> None:
    env = Fickle(seed=1, dtype=torch.float64)
    env.assign(np.arange(8), iteration=0)
    learner = PpoLearner(config(), env.spec, torch.device("cpu"))
    learner.on_assign(env.env_ids)
    with pytest.raises(EnvError, match="same on every step"):
        learner.collect(env, 1, on_step=lambda t: None)
