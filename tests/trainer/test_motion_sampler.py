"""The adaptive motion sampler: what ranks saw is merged once, and kept over every change."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rallypoint.checkpointing.restore import load_checkpoint
from rallypoint.daemon.shared.config import Config, SamplerSection
from rallypoint.trainer.elastic.collectives import SingleProcess
from rallypoint.trainer.elastic.state import TrainingState
from rallypoint.trainer.envs.base import MotionLibrary
from rallypoint.trainer.envs.humanoid import HumanoidTrack
from rallypoint.trainer.errors import StateMismatch, TrainerError
from rallypoint.trainer.evaluate import restore_learner
from rallypoint.trainer.motion_sampler import MotionSampler
from rallypoint.trainer.sampler import ema_sampling_probabilities, sampling_probabilities
from tests.fakes.checkpoints import save
from tests.fakes.gloo import train_over_gloo
from tests.fakes.training import BLOCK, config, make_worker, train

LIBRARY = MotionLibrary(("walk", "squat"), ((50, 50), (25,)))
COUNTS = torch.tensor([[1.0, 3.0, 0.0], [200.0, 100.0, 50.0]], dtype=torch.float64)


def frozen(**ppo: object) -> Config:
    """Nothing is learned, so that every split of the envs sees the same events."""
    return config(
        task="humanoid-track",
        dtype="float32",
        learning_rate=0.0,
        desired_kl=None,
        normalise_actor=False,
        normalise_critic=False,
        epochs=1,
        rollout_steps=40,
        init_std=2.0,
        **ppo,
    )


def counters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in state.items() if name.startswith("sampler/")}


def total(state: dict[str, Tensor], name: str) -> float:
    return sum(t.sum().item() for key, t in counters(state).items() if key.endswith(f"/{name}"))


def test_probabilities_are_those_of_the_formula() -> None:
    sampler = MotionSampler(SamplerSection(), LIBRARY)
    lengths = torch.tensor([50.0, 50.0, 25.0], dtype=torch.float64)
    assert torch.allclose(sampler.probabilities(), lengths / 125, rtol=0, atol=1e-15)
    sampler.merge(COUNTS, world_size=4)
    expected = sampling_probabilities(
        1 + COUNTS[0], 1 + COUNTS[1] / lengths, lengths, uniform=0.1, cap_ratio=50.0
    )
    assert torch.equal(sampler.probabilities(), expected)
    assert torch.allclose(
        expected, torch.tensor([0.2278630460, 0.6741440378, 0.0979929162]).double(), atol=1e-7
    )


def test_running_means_of_failures() -> None:
    sampler = MotionSampler(SamplerSection(kind="ema", alpha=0.25), LIBRARY)
    sampler.merge(COUNTS, world_size=2)
    previous = 0.25 * COUNTS[0]
    sampler.merge(COUNTS, world_size=2)
    expected = ema_sampling_probabilities(previous, COUNTS[0], alpha=0.25, uniform=0.1)
    assert torch.equal(sampler.probabilities(), expected)


def test_uniform_goes_by_frames_whatever_fails() -> None:
    sampler = MotionSampler(SamplerSection(kind="uniform"), LIBRARY)
    sampler.merge(COUNTS, world_size=2)
    assert sampler.probabilities().tolist() == [0.4, 0.4, 0.2]
    assert sampler.figures()["adp_samp/max_over_uniform"] == 1.0


def test_caps_hold_for_the_library() -> None:
    sampler = MotionSampler(SamplerSection(bin_cap=0.4, clip_cap=0.75), LIBRARY)
    sampler.merge(COUNTS, world_size=1)
    p = sampler.probabilities()
    assert p.max() <= 0.4
    assert p[:2].sum() <= 0.75
    with pytest.raises(TrainerError, match=r"clip_cap = 0\.3"):
        MotionSampler(SamplerSection(clip_cap=0.3), LIBRARY)


def test_numeric_24_mean_mode_is_one_over_world_size_and_waits_for_its_turn() -> None:
    sampler = MotionSampler(SamplerSection(sonic_mean_every=3), LIBRARY)
    before = sampler.probabilities()
    for _ in range(2):
        sampler.merge(COUNTS, world_size=4)
        assert torch.equal(sampler.probabilities(), before)
    sampler.merge(COUNTS, world_size=2)  # two ranks have gone
    scaled = COUNTS * (2 / 4 + 1 / 2)
    tensors = sampler.tensors()
    assert torch.equal(tensors["walk/failures"], scaled[0, :2])
    assert torch.equal(tensors["squat/steps"], scaled[1, 2:])
    assert not tensors["walk/pending_failures"].any()
    assert tensors["pending_iterations"] == 0
    assert not torch.equal(sampler.probabilities(), before)


def test_figures_say_where_it_goes() -> None:
    sampler = MotionSampler(SamplerSection(uniform=0.0), MotionLibrary(("a",), ((10, 10),)))
    even = sampler.figures()
    assert even["adp_samp/entropy"] == pytest.approx(np.log(2))
    assert even["adp_samp/max_probability"] == 0.5
    sampler.merge(torch.tensor([[2.0, 0.0], [0.0, 0.0]]).double(), world_size=1)
    moved = sampler.figures()
    assert moved["adp_samp/max_probability"] == 0.75
    assert moved["adp_samp/failure_rate_max"] == 3.0
    assert moved["adp_samp/failure_rate_mean"] == 2.0
    assert moved["adp_samp/failures"] == 2.0


def test_numeric_25_a_failure_is_one_of_the_bin_it_happened_in() -> None:
    env = HumanoidTrack(seed=1, dtype=torch.float64)
    library = env.spec.library
    assert library is not None
    env.assign(np.arange(BLOCK), iteration=1)
    squat, march = library.clips.index("squat_slow"), library.clips.index("march_slow")
    other = np.array(library.clip_of_bin) == march
    env.set_probabilities(other / other.sum())  # whatever starts anew, starts in this clip
    env.begin_rollout(1)
    env.start_clips(np.full(BLOCK, squat))
    failed, seen = [], []
    fallen = False
    for t in range(60):
        if t == 55:  # 56 steps from frame 0: in the second bin
            rows = env.rows()
            rows["physics"][3, 4:8] = [
                0.0,
                1.0,
                0.0,
                0.0,
            ]  # time first, then position, then rotation
            env.load_rows(env.env_ids, rows)
        result = env.step(torch.zeros(BLOCK, env.spec.action_dim, dtype=torch.float64))
        assert result.bins is not None
        failed += result.bins[result.terminated].tolist()
        seen.append(result.bins.tolist())
        if result.terminated[3]:
            fallen = True
            break
    assert fallen
    first = library.clip_of_bin.index(squat)
    assert failed == [first + 1]
    assert seen[0] == [first] * BLOCK
    after = env.step(torch.zeros(BLOCK, env.spec.action_dim, dtype=torch.float64)).bins
    assert after is not None
    assert other[after[3]]  # the next step of that env is one of its new clip
    assert not other[after[[0, 1, 2, 4, 5, 6, 7]]].any()


def test_counts_of_a_rollout_are_its_steps_and_its_failures() -> None:
    worker = make_worker(frozen(), (0, 1))
    rollout = worker.collect(1)
    assert rollout.bins is not None
    worker.finish(rollout, SingleProcess())
    state = worker.live()
    assert total(state, "steps") == rollout.env_steps
    assert total(state, "failures") == rollout.terminated.sum().item() > 0


def test_a_redone_iteration_counts_its_rollout_once() -> None:
    worker = make_worker(frozen(), (0,))
    state = TrainingState(worker.registry)
    rollout = worker.collect(1)
    worker.finish(rollout, SingleProcess())
    first = {name: tensor.clone() for name, tensor in counters(worker.live()).items()}
    state.roll_back()  # prepared, but not committed
    worker.finish(rollout, SingleProcess())
    assert total(worker.live(), "steps") == rollout.env_steps
    assert all(torch.equal(worker.live()[name], tensor) for name, tensor in first.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "shards", [((0, 2), (1, 3)), ((3,), (0, 1), (2,)), ((0, 1), (), (3,), (2,))]
)
def test_numeric_24_ranks_equal_one_process_that_saw_all(
    shards: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    settings = frozen()
    union = train(settings, [range(4)], 2)[0]
    expected = counters(union.live())
    assert total(union.live(), "failures") > 0
    (ranks,) = train_over_gloo(settings, [shards], 2, tmp_path)
    for state in ranks:
        found = counters(state)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        worker = make_worker(settings, ())
        worker.load(state)
        assert worker.learner.sampler is not None
        assert union.learner.sampler is not None
        p = worker.learner.sampler.probabilities()
        assert torch.equal(p, union.learner.sampler.probabilities())
        assert p.max() > p.min()


@pytest.mark.slow
def test_numeric_24_a_checkpoint_restores_at_any_world_size(tmp_path: Path) -> None:
    settings = frozen()
    union = train(settings, [range(4)], 1)[0]
    loaded = load_checkpoint(str(save(tmp_path, union, settings)))
    for shards in ([range(4)], [(0, 1, 2), (3,)], [(0,), (1,), (2,), (3,)]):
        workers = train(settings, shards, 1, state=loaded.tensors, first=2)
        new = [
            total(worker.live(), "steps") - total(dict(loaded.tensors), "steps")
            for worker in workers
        ]
        assert set(new) == {4.0 * BLOCK * settings.ppo.rollout_steps}
        assert len({worker.packed().hash() for worker in workers}) == 1


def test_a_changed_library_is_refused_by_the_names_of_its_clips(tmp_path: Path) -> None:
    settings = frozen()
    worker = make_worker(settings, ())
    path = save(tmp_path, worker, settings)
    library = worker.env.spec.library
    assert library is not None
    changed = replace(library, clips=("cartwheel", *library.clips[1:]))
    with pytest.raises(StateMismatch, match="sampler/cartwheel/failures, sampler/cartwheel/steps"):
        restore_learner(
            load_checkpoint(str(path)), settings, replace(worker.env.spec, library=changed)
        )
