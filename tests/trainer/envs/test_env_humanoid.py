"""``humanoid-track``: reference motions that can be followed, starts, ends, and groups of observations."""

import mujoco
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rallypoint.trainer.envs.humanoid import LEAD_IN_FRAMES, HumanoidTrack
from rallypoint.trainer.envs.humanoid_model import (
    JOINT_HIGH_RAD,
    JOINT_LOW_RAD,
    JOINTS,
    SOLE_M,
    STIFFNESS_N_M_RAD,
    mjcf,
)
from rallypoint.trainer.envs.motions import CLIPS, FPS, Clip, clip_qpos
from rallypoint.trainer.envs.reference import LIBRARY, reference
from rallypoint.trainer.evaluate_motions import evaluate_clips

MODEL = mujoco.MjModel.from_xml_string(mjcf())
CLIP_IDS = [clip.name for clip in CLIPS]


def env_with(count: int) -> HumanoidTrack:
    env = HumanoidTrack(seed=1, dtype=torch.float64)
    env.assign(np.arange(count), iteration=1)
    env.begin_rollout(1)
    return env


def only(bins: NDArray[np.bool_]) -> NDArray[np.float64]:
    p: NDArray[np.float64] = bins / bins.sum()
    return p


def test_the_model_has_the_joints_and_servos_that_it_says() -> None:
    assert MODEL.nu == len(JOINTS) >= 17
    assert [MODEL.joint(1 + i).name for i in range(MODEL.nu)] == [j.name for j in JOINTS]
    assert np.array_equal(MODEL.actuator_gainprm[:, 0], STIFFNESS_N_M_RAD)
    assert np.array_equal(MODEL.jnt_range[1:], np.stack([JOINT_LOW_RAD, JOINT_HIGH_RAD], axis=1))


@pytest.mark.parametrize("clip", CLIPS, ids=CLIP_IDS)
def test_a_motion_keeps_to_joint_ranges_with_level_soles(clip: Clip) -> None:
    qpos = clip_qpos(clip)
    assert (qpos[:, 7:] >= JOINT_LOW_RAD).all()
    assert (qpos[:, 7:] <= JOINT_HIGH_RAD).all()
    data = mujoco.MjData(MODEL)
    heights = []
    for pose in qpos[::7]:
        data.qpos[:] = pose
        mujoco.mj_kinematics(MODEL, data)
        soles = [data.site(f"{side}_sole") for side in ("left", "right")]
        heights.append([sole.xpos[2] for sole in soles])
        # Level but for the small turn of a foot about its own axis that no hip yaw takes out.
        assert all(sole.xmat[8] > 0.999 for sole in soles)
    on_ground = SOLE_M - 0.035  # height of a sole's middle
    assert np.min(heights, axis=1) == pytest.approx(on_ground, abs=1e-6)  # one foot always stands
    assert (np.max(heights) > on_ground + 0.02) == clip.stepping


def test_clips_begin_and_end_standing_still() -> None:
    arrays = reference()
    for edge in (arrays.first, arrays.last):
        assert arrays.qpos[edge, 7:] == pytest.approx(
            np.tile(arrays.stand, (len(CLIPS), 1)), abs=1e-9
        )
        assert np.abs(arrays.qvel[edge]).max() < 0.2


def test_velocities_are_those_of_the_positions() -> None:
    arrays = reference()
    inside = np.setdiff1d(np.arange(len(arrays.qpos)), [*arrays.first, *arrays.last])
    difference = (arrays.qpos[inside + 1, 7:] - arrays.qpos[inside - 1, 7:]) * FPS / 2
    assert arrays.qvel[inside, 6:] == pytest.approx(difference, abs=1e-9)


def test_bins_cover_every_frame_once() -> None:
    assert sum(LIBRARY.lengths) == sum(clip.frames for clip in CLIPS)
    assert len(set(LIBRARY.clips)) == len(CLIPS)
    assert len(set(LIBRARY.lengths)) > 1  # the last bin of a clip may be short


def test_episodes_start_in_the_bins_that_are_drawn_or_shortly_before() -> None:
    env = HumanoidTrack(seed=1, dtype=torch.float64)
    arrays = reference()
    chosen = arrays.bin_of_frame[arrays.first[3] + 160], arrays.bin_of_frame[arrays.last[8]]
    env.set_probabilities(only(np.isin(np.arange(len(LIBRARY.lengths)), chosen)))
    env.assign(np.arange(400), iteration=1)
    frames = env.rows()["frame"].astype(int)
    clips = arrays.clip_of_bin[arrays.bin_of_frame[frames]]
    assert set(clips.tolist()) == {3, 8}
    assert abs((clips == 3).mean() - 0.5) < 0.1
    for clip, start in zip((3, 8), chosen, strict=True):
        first = arrays.bin_first[start]
        mine = frames[clips == clip]
        assert (mine > first - LEAD_IN_FRAMES).all()
        assert (mine < first + arrays.bin_frames[start]).all()
        assert (mine < arrays.last[clip]).all()  # at least one step is left


def test_a_clip_ends_in_a_time_out_at_its_last_frame() -> None:
    env = env_with(len(CLIPS))
    env.start_clips(np.arange(len(CLIPS)))
    rows = env.rows()
    rows["frame"][:] = reference().last - 1
    env.load_rows(env.env_ids, rows)
    result = env.step(torch.zeros(len(CLIPS), len(JOINTS), dtype=torch.float64))
    assert (result.truncated | result.terminated).all()
    assert result.truncated[CLIP_IDS.index("stand")]
    assert result.bins is not None
    assert result.bins.tolist() == reference().bin_of_frame[reference().last].tolist()


def test_the_critic_sees_what_the_actor_sees_and_more() -> None:
    env = env_with(6)
    obs = env.start_clips(np.arange(6))
    width = env.spec.obs_dims["actor"]
    assert torch.equal(obs["critic"][:, :width], obs["actor"])
    assert torch.equal(obs["critic"][:, -len(CLIPS) :].argmax(dim=1), torch.arange(6))
    moved = env.rows()
    moved["physics"][:, 1] += 3.0  # along x: time comes first
    env.load_rows(env.env_ids, moved)
    after = env.begin_rollout(2)
    assert torch.equal(after["actor"], obs["actor"])  # a robot does not know where it is
    assert not torch.equal(after["critic"], obs["critic"])


@pytest.mark.slow
def test_no_action_is_its_own_baseline() -> None:
    env = HumanoidTrack(seed=1, dtype=torch.float64)

    def still(obs: object) -> torch.Tensor:
        return torch.zeros(24, len(JOINTS), dtype=torch.float64)

    for clip in evaluate_clips(still, env, 24, first_env_id=2**31):
        assert clip.episodes == 2
        assert (clip.survival, clip.rmse_rad) == (clip.zero_survival, clip.zero_rmse_rad)
        assert 0.02 < clip.rmse_rad < 0.3
