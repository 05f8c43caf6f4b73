"""Merging, checking and explaining the configuration."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rallypoint.daemon.shared import configload
from rallypoint.daemon.shared.common import COMMON, with_common
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.configload import Given, from_text, load, parse_assignment
from rallypoint.daemon.shared.errors import BudgetError, ConfigError
from rallypoint.daemon.shared.profiles import PROFILES


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def assigned(*assignments: str) -> list[Given]:
    return [parse_assignment(text) for text in assignments]


def test_no_input_gives_the_default_task_and_its_overrides() -> None:
    resolved = load()
    assert resolved.config.env.task == "quadruped-velocity"
    assert resolved.config.ppo.hidden == (128, 128)
    assert resolved.sources["ppo.hidden"] == "task quadruped-velocity"
    assert resolved.sources["ppo.gamma"] == "default"
    assert set(resolved.sources) == {path for path, _ in configload.items(Config())}


def test_each_source_beats_the_ones_below_it(tmp_path: Path) -> None:
    file = write(tmp_path / "job.toml", "[ppo]\nhidden = [1]\ngamma = 0.5\nlam = 0.5\nclip = 0.5\n")
    environ = {"RALLYPOINT_PPO__LAM": "0.6", "RALLYPOINT_PPO__CLIP": "0.6", "PATH": "/bin"}
    resolved = load(file, environ=environ, command_line=assigned("ppo.clip=0.7"))
    ppo, sources = resolved.config.ppo, resolved.sources
    assert (ppo.hidden, ppo.gamma, ppo.lam, ppo.clip) == ((1,), 0.5, 0.6, 0.7)
    assert sources["ppo.hidden"] == sources["ppo.gamma"] == str(file)
    assert sources["ppo.lam"] == "environment variable RALLYPOINT_PPO__LAM"
    assert sources["ppo.clip"] == "--set"


def test_the_task_that_wins_gives_the_overrides(tmp_path: Path) -> None:
    file = write(tmp_path / "job.toml", '[env]\ntask = "cartpole"\n')
    assert load(file).config.ppo.hidden == (32, 32)
    assert load(file, command_line=assigned("ppo.hidden=[8]")).config.ppo.hidden == (8,)


def test_a_profile_is_below_the_task_and_above_the_schema(tmp_path: Path) -> None:
    resolved = load(command_line=assigned("job.profile=rsl_rl"))
    ppo, sources = resolved.config.ppo, resolved.sources
    assert (ppo.grad_clip, sources["ppo.grad_clip"]) == ("separate", "profile rsl_rl")
    assert (ppo.hidden, sources["ppo.hidden"]) == ((128, 128), "task quadruped-velocity")
    assert (ppo.gamma, sources["ppo.gamma"]) == (0.99, "default")
    file = write(tmp_path / "job.toml", '[job]\nprofile = "rsl_rl"\n[ppo]\ngrad_clip = "joint"\n')
    resolved = load(file)
    assert (resolved.config.ppo.grad_clip, resolved.sources["ppo.grad_clip"]) == (
        "joint",
        str(file),
    )
    assert resolved.config.ppo.mini_batch_of == "transitions"


def test_the_profile_is_sonic_unless_told() -> None:
    resolved = load()
    assert resolved.config.job.profile == "sonic"
    assert resolved.sources["ppo.normaliser_prior"] == "profile sonic"
    assert load(command_line=assigned("job.profile=sonic")).config == resolved.config


def test_profiles_are_sets_of_values_for_the_same_keys() -> None:
    keys = {tuple(profile) for profile in PROFILES.values()}
    assert len(keys) == 1
    for name, profile in PROFILES.items():
        typed = [Given(path, value, name) for path, value in profile.items()]
        values = dict(configload.items(load(command_line=typed).config))
        assert {path: values[path] for path in profile} == dict(profile)


def test_failpoint_variables_are_no_configuration() -> None:
    load(environ={"RALLYPOINT_FAILPOINTS": "rollout=kill", "RALLYPOINT_FAILPOINT_LOG": "x"})


def test_typed_values_are_toml_else_text_and_none_unsets() -> None:
    resolved = load(command_line=assigned("job.iterations=none", "job.name=42", "ppo.gamma=1"))
    assert resolved.config.job.iterations is None
    assert resolved.config.job.name == "42"
    assert resolved.config.ppo.gamma == 1.0


def test_a_value_cannot_smuggle_in_other_keys() -> None:
    with pytest.raises(ConfigError, match="expected an integer"):
        load(command_line=assigned("job.seed=1\nother=2"))


@pytest.mark.parametrize(
    ("assignment", "parts"),
    [
        ("job.sed=1", ("'job.sed'", "--set", "'job.seed'")),
        ("wrokers.seed=1", ("section 'wrokers'", "'job.seed'")),
        ("workers=3", ("'workers'", "'node.workers'")),
        ("completely.different=1", ("rallypoint config",)),
        ("job.seed=abc", ("job.seed = 'abc'", "--set", "an integer")),
        ("ppo.hidden=3", ("a list of integers",)),
        ("ppo.learning_rate_bounds=[1]", ("a list of 2 numbers",)),
        ("ppo.normalise_actor=1", ("true or false",)),
        ("env.backend=isaac", ("env.backend", "'embedded'")),
        ("env.task=walk", ("env.task = 'walk'", "cartpole, humanoid-track, pointmass")),
        ("env.task=[1]", ("no task",)),
        ("job.profile=rsl-rl", ("job.profile = 'rsl-rl'", "--set", "no profile", "rsl_rl, sonic")),
        ("ppo.kl_form=approximate", ("'exact' or 'sonic'",)),
        ("ppo.advantage_ddof=2", ("at most 1",)),
        ("ppo.micro_batches=3", ("ppo.micro_batches = 3", "env.block / ppo.mini_batches = 2")),
        ("ppo.std_bounds=[0.5, 0.1]", ("ppo.std_bounds = (0.5, 0.1)", "above 0", "not below")),
        ("ppo.learning_rate_bounds=[0, 1]", ("ppo.learning_rate_bounds", "above 0")),
        ("ppo.hidden=[]", ("ppo.hidden", "at least one layer")),
        ("ppo.critic_hidden=[8, 0]", ("ppo.critic_hidden = (8, 0)", "width of at least 1")),
        ("ppo.max_grad_norm=0", ("ppo.max_grad_norm = 0", "above 0", "none")),
        ("ppo.desired_kl=0", ("ppo.desired_kl = 0.0", "above 0", "none switches it off")),
        ("ppo.init_std=-1", ("ppo.init_std = -1", "above 0")),
        ("ppo.learning_rate=-1", ("ppo.learning_rate = -1", "at least 0")),
        ("job.seed=-1", ("job.seed = -1", "at least 0")),
        ("job.seed=99999999999999999999", ("job.seed = 99999999999999999999", "at most 7.2")),
        ("ppo.normaliser_clip=-1", ("ppo.normaliser_clip", "above 0")),
        ("log.level=loud", ("'debug' or 'info' or 'warning' or 'error'",)),
        ("ppo.gamma=nan", ("must be finite",)),
        ("ppo.gamma=1.5", ("ppo.gamma = 1.5", "at most 1")),
        ("ppo.mini_batches=0", ("at least 1",)),
        ("metrics.port=70000", ("at most 65535",)),
        ("job.name=../x", ("job.name = '../x'", "letter or digit")),
        ("membership.join_debounce_s=600", ("nest wrongly", "join_debounce_s")),
        ("no-equals-sign", ("section.key=value",)),
    ],
)
def test_a_bad_value_is_named_with_its_origin_and_a_remedy(
    assignment: str, parts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(command_line=assigned(assignment))
    for part in parts:
        assert part in str(caught.value)


def test_unknown_keys_of_file_and_environment_name_where_they_stand(tmp_path: Path) -> None:
    file = write(tmp_path / "job.toml", "[ppo]\ngama = 1\n")
    with pytest.raises(ConfigError, match=r"'ppo\.gama' \(from .*job\.toml\).*'ppo\.gamma'"):
        load(file)
    with pytest.raises(ConfigError, match=r"RALLYPOINT_PPO__GAMA\).*'ppo\.gamma'"):
        load(environ={"RALLYPOINT_PPO__GAMA": "1"})
    with pytest.raises(ConfigError, match=r"unknown section \[pop\] in .*job\.toml"):
        load(write(file, "[pop]\ngamma = 1\n"))
    with pytest.raises(ConfigError, match="outside a section"):
        load(write(file, "job = 1\n"))


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot be read: No such file"):
        load(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match=r"bad\.toml: not valid TOML"):
        load(write(tmp_path / "bad.toml", "[ppo\n"))


def test_numeric_32_divisibility_is_checked_for_every_world_size() -> None:
    with pytest.raises(BudgetError, match=r"env\.block = 12"):
        load(command_line=assigned("env.block=12"))
    with pytest.raises(BudgetError, match="fewer than 9 ranks"):
        load(command_line=assigned("env.budget=global", "env.num_envs=64", "node.workers=9"))


def test_the_hash_covers_what_workers_must_share_and_nothing_else() -> None:
    base = configload.config_hash(load().config)

    def changed(assignment: str) -> bool:
        return configload.config_hash(load(command_line=assigned(assignment)).config) != base

    assert all(map(changed, ("job.seed=2", "env.num_envs=64", "ppo.gamma=0.9")))
    assert not any(map(changed, ("job.iterations=9", "node.workers=4", "log.level=debug")))


OWN = {"node", "membership", "checkpoint", "metrics", "curves", "log", "preemption"}
"""Sections that nodes of one job may have other values in, but for the keys of `COMMON`."""
OWN_KEYS = {
    *("job.name", "job.profile", "job.warm_start"),  # where, defaults, kept in the job's record
    *(f"membership.{x}" for x in ("backend", "endpoints", "ca_file", "cert_file", "key_file")),
    *(f"membership.{x}" for x in ("user", "password_file", "quarantine_after")),
    "membership.quarantine_cooldown_s",
}


def test_every_key_of_the_job_and_of_its_membership_is_common_or_a_matter_of_the_node() -> None:
    keys = {p for p, _ in configload.items(Config()) if p.startswith(("job.", "membership."))}
    common = {path for path in COMMON if path in keys}
    assert keys == common | OWN_KEYS | {"job.seed"}
    assert not common & OWN_KEYS
    changed = load(command_line=assigned("job.spares=1", "job.max_workers=5")).config
    assert with_common(load().config, dict(configload.items(changed))) == changed


def test_every_section_is_agreed_on_or_a_matter_of_the_node() -> None:
    """``job`` is neither: its bounds may be raised by a resume."""
    base = Config()
    agreed = set()
    for path, _ in configload.items(base):
        section, _, key = path.partition(".")
        changed = replace(getattr(base, section), **{key: "changed"})
        if configload.config_hash(replace(base, **{section: changed})) != configload.config_hash(
            base
        ):
            agreed.add(path)
    assert {path for path in agreed if path.startswith("job.")} == {"job.seed"}
    whole = {name for name in configload.schema() if name not in {"job", *OWN}}
    keys = {path for path, _ in configload.items(base) if path.partition(".")[0] in whole}
    assert agreed == keys | {"job.seed"}


def test_ordered_sums_need_choices_that_no_world_size_changes() -> None:
    load(command_line=assigned("ppo.reduction=ordered"))
    with pytest.raises(ConfigError, match=r"ordered.*'per_rank' and 'rank'"):
        load(command_line=assigned("ppo.reduction=ordered", "job.profile=rsl_rl"))


def test_half_precision_goes_with_float32_only() -> None:
    load(command_line=assigned("ppo.autocast=bfloat16"))
    with pytest.raises(ConfigError, match=r"ppo\.autocast = 'bfloat16' goes with .*'float64'"):
        load(command_line=assigned("ppo.autocast=bfloat16", "ppo.dtype=float64"))


def test_the_mean_over_ranks_is_one_of_sonic_only() -> None:
    load(command_line=assigned("sampler.sonic_mean_every=200"))
    with pytest.raises(ConfigError, match=r"sonic_mean_every = 200 goes with .*not with 'ema'"):
        load(command_line=assigned("sampler.sonic_mean_every=200", "sampler.kind=ema"))


def test_workers_read_back_what_was_written() -> None:
    config = load(command_line=assigned("ppo.hidden=[7, 8]", "job.env_steps=5")).config
    assert configload.from_json(configload.to_json(config)) == config
    with pytest.raises(ConfigError, match=r"config\.json"):
        configload.from_json(b'{"job": 3}')


def test_values_are_shown_as_they_could_be_typed() -> None:
    config = load().config
    typed = [
        from_text(path, configload.shown(path, value), "test")
        for path, value in configload.items(config)
    ]
    assert load(command_line=typed).config == config


def test_ordered_sums_are_for_the_cpu() -> None:
    given = [parse_assignment("ppo.reduction=ordered"), parse_assignment("node.devices=[0,1]")]
    with pytest.raises(ConfigError, match="exact on the CPU only"):
        load(command_line=given)
    assert load(command_line=given[:1]).config.ppo.reduction == "ordered"


def test_a_backup_of_envs_needs_somebody_who_takes_them_over() -> None:
    with pytest.raises(ConfigError, match=r'needs env.budget = "global"'):
        load(command_line=assigned("env.backup=node"))
    with pytest.raises(ConfigError, match=r'needs env.backup = "node"'):
        load(command_line=assigned("checkpoint.env_rows=true"))
    every_s = (*ETCD, "env.backup=node", "env.budget=global", "checkpoint.every_s=60")
    with pytest.raises(ConfigError, match=r"does not go with checkpoint.every_s = 60"):
        load(command_line=assigned(*every_s, "checkpoint.env_rows=true"))
    exact = assigned("env.backup=node", "env.budget=global", "checkpoint.env_rows=true")
    assert load(command_line=exact).config.checkpoint.env_rows


ETCD = (
    "membership.backend=etcd",
    "node.name=a",
    'membership.endpoints=["10.0.0.1:2379", "[fd00::1]:2379"]',
    "job.max_workers=8",
)


def test_an_etcd_cluster_needs_endpoints_and_pairs_of_files() -> None:
    config = load(command_line=assigned(*ETCD, "membership.ca_file=ca.pem")).config
    assert config.membership.endpoints == ("10.0.0.1:2379", "[fd00::1]:2379")
    assert config.membership.ca_file == "ca.pem"


@pytest.mark.parametrize(
    ("assignments", "part"),
    [
        (("membership.backend=etcd",), "needs membership.endpoints"),
        ((ETCD[0], *ETCD[2:]), "needs node.name, the name of this node among those of the job"),
        ((*ETCD, "node.name=local"), "set it, another on each node"),
        (ETCD[:3], "needs job.max_workers"),
        ((*ETCD, 'membership.endpoints=["http://a:2379"]'), "must be host:port"),
        ((*ETCD, 'membership.endpoints=["fd00::1:2379"]'), "must be host:port"),
        ((*ETCD, "membership.user=a"), "user and membership.password_file belong together"),
        ((*ETCD, "membership.key_file=a"), "cert_file and membership.key_file belong together"),
        ((*ETCD, "membership.cert_file=a", "membership.key_file=b"), "without membership.ca_file"),
        ((*ETCD, "membership.detect_s=1.5"), "etcd grants no lease below 2 s"),
        (ETCD[1:], "membership.backend is 'embedded'"),
        (("membership.user=a",), "membership.backend is 'embedded'"),
    ],
)
def test_keys_of_a_store_that_do_not_fit_are_refused(
    assignments: tuple[str, ...], part: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(part)):
        load(command_line=assigned(*assignments))


@pytest.mark.parametrize(
    ("given", "words"),
    [("checkpoint.url=s3:/bucket/x", "neither a path nor a URL"), ("checkpoint.url=", "is empty")],
)
def test_a_place_of_checkpoints_that_is_a_slip_is_refused(given: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"checkpoint\.url .*{words}"):
        load(command_line=[parse_assignment(given)])
