"""``rallypoint config --from-rsl-rl``: both layouts of RSL-RL's agent file."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from rallypoint.daemon.cli import main
from rallypoint.daemon.shared.configload import load

ONE_POLICY = """
seed: 42
device: cuda:0
num_steps_per_env: 32
max_iterations: 300
empirical_normalization: true
obs_groups: {}
clip_actions: null
save_interval: 50
experiment_name: unitree_go2_flat
run_name: ''
logger: tensorboard
resume: false
load_run: .*
load_checkpoint: model_.*.pt
policy:
  class_name: ActorCritic
  init_noise_std: 0.8
  noise_std_type: log
  actor_hidden_dims: !!python/tuple
  - 128
  - 64
  critic_hidden_dims: [256, 128]
  activation: relu
algorithm:
  class_name: PPO
  num_learning_epochs: 6
  num_mini_batches: 5
  learning_rate: 0.0005
  schedule: fixed
  gamma: 0.98
  lam: 0.9
  entropy_coef: 0.02
  desired_kl: 0.02
  max_grad_norm: 0.5
  value_loss_coef: 2.0
  use_clipped_value_loss: false
  clip_param: 0.1
  normalize_advantage_per_mini_batch: true
  rnd_cfg: null
  symmetry_cfg:
    use_data_augmentation: true
"""
TWO_NETWORKS = """
runner:
  class_name: OnPolicyRunner
  seed: 7
  num_steps_per_env: 24
  max_iterations: 5000
  save_interval: 100
  experiment_name: walk in the park
  logger: wandb
  wandb_project: robots
  wandb_tags: !!python/tuple []
  clip_actions: 1.0
  obs_groups:
    actor: [policy]
    critic: [policy, privileged]
  actor:
    class_name: MLPModel
    hidden_dims: [512, 256, 128]
    activation: elu
    obs_normalization: true
    cnn_cfg: null
    distribution_cfg:
      class_name: GaussianDistribution
      init_std: 0.25
      std_range: [0.05, 0.5]
      std_type: scalar
  critic:
    class_name: MLPModel
    hidden_dims: [512, 512]
    activation: elu
    obs_normalization: false
  algorithm:
    class_name: PPO
    optimizer: adamw
    num_learning_epochs: 5
    num_mini_batches: 4
    learning_rate: 0.001
    schedule: adaptive
    desired_kl: 0.01
    share_cnn_encoders: false
"""


def converted(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """The configuration of the job file that is printed, and the file."""
    agent = tmp_path / "agent.yaml"
    agent.write_text(text)
    assert main(["config", "--from-rsl-rl", str(agent)]) == 0
    printed = capsys.readouterr().out
    tomllib.loads(printed)
    job = tmp_path / "job.toml"
    job.write_text(printed)
    return load(job).config, printed


def test_the_layout_with_one_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, printed = converted(tmp_path, ONE_POLICY, capsys)
    job, ppo = config.job, config.ppo
    assert (job.profile, job.seed, job.iterations) == ("rsl_rl", 42, 300)
    assert (job.name, config.checkpoint.every_iterations) == ("unitree_go2_flat", 50)
    assert (ppo.hidden, ppo.critic_hidden, ppo.activation) == ((128, 64), (256, 128), "relu")
    assert (ppo.init_std, ppo.noise, ppo.rollout_steps) == (0.8, "log_std", 32)
    assert (ppo.normalise_actor, ppo.normalise_critic) == (True, True)
    assert (ppo.epochs, ppo.mini_batches, config.env.block) == (6, 5, 40)
    assert (ppo.learning_rate, ppo.desired_kl) == (0.0005, None)
    assert (ppo.gamma, ppo.lam, ppo.clip, ppo.entropy_coef) == (0.98, 0.9, 0.1, 0.02)
    assert (ppo.max_grad_norm, ppo.value_coef, ppo.value_loss) == (0.5, 2.0, "squared")
    assert ppo.advantage_scope == "mini_batch"
    listed = printed.partition("# not mapped:\n")[2].splitlines()
    assert [line.split(" = ")[0] for line in listed] == ["#   device", "#   algorithm.symmetry_cfg"]
    assert "node.devices" in listed[0]
    assert "there is no symmetry yet" in listed[1]


def test_the_layout_with_two_networks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, printed = converted(tmp_path, TWO_NETWORKS, capsys)
    ppo = config.ppo
    assert (ppo.hidden, ppo.critic_hidden) == ((512, 256, 128), (512, 512))
    assert (ppo.init_std, ppo.std_bounds, ppo.noise) == (0.25, (0.05, 0.5), "std")
    assert (ppo.normalise_actor, ppo.normalise_critic) == (True, False)
    assert (ppo.desired_kl, ppo.learning_rate) == (0.01, 0.001)
    assert (config.curves.wandb, config.curves.wandb_project) == (True, "robots")
    listed = printed.partition("# not mapped:\n")[2]
    for name in ("experiment_name", "clip_actions", "obs_groups", "algorithm.optimizer"):
        assert f"#   {name} = " in listed
    assert listed.count("\n") == 4


def test_what_is_not_said_is_as_in_rsl_rl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = converted(tmp_path, "algorithm: {class_name: PPO}\n", capsys)
    assert (config.ppo.mini_batch_of, config.ppo.grad_clip) == ("transitions", "separate")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("just: words\n", "no agent file of RSL-RL: it has no section 'algorithm'"),
        ("algorithm: [", "not valid YAML"),
        ("algorithm: {gamma: 7}\n", "ppo.gamma = 7"),
        ("algorithm: {gamma: !!python/name:os.system ''}\n", "ppo.gamma"),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    agent = tmp_path / "agent.yaml"
    agent.write_text(text)
    assert main(["config", "--from-rsl-rl", str(agent)]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert str(agent) in told


def test_a_file_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "--from-rsl-rl", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: cannot be read: No such file" in capsys.readouterr().err
