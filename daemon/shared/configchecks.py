"""Keys of the configuration that must go together; each message says which, and a remedy."""

import ipaddress
from urllib.parse import urlsplit

from rallypoint.daemon.shared import envbackends
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.rundir import half_a_url, looks_like_url


def check(config: Config) -> None:
    """Raises `ConfigError` for keys that contradict each other."""
    envbackends.place_of(config.env.backend)
    _check_devices(config)
    _check_algorithm(config)
    _check_backup(config)
    _check_tiers(config)
    _check_auxiliary(config)
    _check_distillation(config)
    _check_preemption(config)
    _check_metrics(config)


def _check_devices(config: Config) -> None:
    devices, workers = config.node.devices, config.node.workers
    if devices is not None and (len(devices) != workers or len(set(devices)) != workers):
        raise ConfigError(
            f"node.devices = {list(devices)} must name a GPU of its own for each of node.workers = "
            f"{workers} slots"
        )
    if devices is not None and config.ppo.reduction == "ordered":
        raise ConfigError(
            f'ppo.reduction = "ordered" is exact on the CPU only, but node.devices = {list(devices)}; '
            'take ppo.reduction = "ddp", or leave node.devices out'
        )


def _check_algorithm(config: Config) -> None:
    ppo = config.ppo
    if ppo.reduction == "ordered" and (ppo.advantage_scope, ppo.permutation_scope) != (
        "global",
        "block",
    ):
        raise ConfigError(
            'ppo.reduction = "ordered" needs ppo.advantage_scope = "global" and ppo.permutation_scope = '
            f'"block", not {ppo.advantage_scope!r} and {ppo.permutation_scope!r}: those depend on the '
            "number of workers"
        )
    if ppo.reduction == "ordered" and config.sampler.sonic_mean_every is not None:
        raise ConfigError(
            'ppo.reduction = "ordered" needs sampler.sonic_mean_every = none: a mean over ranks depends on '
            "the number of workers"
        )
    if config.ppo.autocast is not None and config.ppo.dtype != "float32":
        raise ConfigError(
            f"ppo.autocast = {config.ppo.autocast!r} goes with ppo.dtype = 'float32' only, not with "
            f"{config.ppo.dtype!r}: torch does not cast it"
        )
    if config.sampler.sonic_mean_every is not None and config.sampler.kind != "sonic":
        raise ConfigError(
            f"sampler.sonic_mean_every = {config.sampler.sonic_mean_every} goes with sampler.kind = "
            f"'sonic' only, not with {config.sampler.kind!r}"
        )


def _check_backup(config: Config) -> None:
    env = config.env
    if env.backup == "node" and env.budget != "global":
        raise ConfigError(
            f'env.backup = "node" needs env.budget = "global", but it is {env.budget!r}: under it the '
            "env blocks of a lost worker lapse, and nobody takes them over"
        )
    if config.checkpoint.env_rows and env.backup != "node":
        raise ConfigError(
            'checkpoint.env_rows = true needs env.backup = "node": env rows are read from that backup'
        )
    many = config.membership.backend != "embedded"
    if config.checkpoint.env_rows and many and config.checkpoint.every_s is not None:
        raise ConfigError(
            f"checkpoint.env_rows = true with several nodes does not go with checkpoint.every_s = "
            f"{config.checkpoint.every_s:g}: all ranks gather the rows, and a clock is rank 0's alone; take "
            "checkpoint.every_iterations"
        )


def _check_tiers(config: Config) -> None:
    section = config.checkpoint
    if section.url is not None and looks_like_url(section.url):
        raise ConfigError(f"checkpoint.url = {half_a_url(section.url)}")
    if section.url == "":
        raise ConfigError(
            "checkpoint.url is empty; give a directory or a URL, or leave it out: checkpoints are in the "
            "run's directory then"
        )
    if section.local_every_iterations is not None and section.url is None:
        raise ConfigError(
            f"checkpoint.local_every_iterations = {section.local_every_iterations} is beside a "
            "checkpoint.url, and there is none: all checkpoints are local then, every "
            "checkpoint.every_iterations"
        )
    if section.credentials_file is not None and (section.url is None or "://" not in section.url):
        raise ConfigError(
            f"checkpoint.credentials_file = {section.credentials_file!r} is for a checkpoint.url such as "
            f"s3://bucket/path, not for {section.url!r}"
        )


def _check_auxiliary(config: Config) -> None:
    aux = config.aux
    if aux.latent is not None and aux.latent < 1:
        raise ConfigError(f"aux.latent = {aux.latent} must be at least 1, or none")
    if not 0.0 <= aux.privileged_share <= 1.0:
        raise ConfigError(f"aux.privileged_share = {aux.privileged_share} must be from 0 to 1")
    if min(aux.reconstruction_coef, aux.latent_coef, aux.scale) < 0.0:
        raise ConfigError(
            f"aux.reconstruction_coef = {aux.reconstruction_coef}, aux.latent_coef = {aux.latent_coef} and "
            f"aux.scale = {aux.scale} must not be negative"
        )
    if aux.latent is not None and config.distill.teacher is not None:
        raise ConfigError(
            f"aux.latent = {aux.latent} does not go with distill.teacher: a student has no auxiliary losses"
        )


def _check_distillation(config: Config) -> None:
    distill = config.distill
    if not 0.0 <= distill.beta <= 1.0 or min(distill.coef, distill.ppo_coef) < 0.0:
        raise ConfigError(
            f"distill.beta = {distill.beta} must be a share from 0 to 1, distill.coef = {distill.coef} and "
            f"distill.ppo_coef = {distill.ppo_coef} must not be negative"
        )
    if distill.beta_iterations is not None and distill.beta_iterations < 1:
        raise ConfigError(f"distill.beta_iterations = {distill.beta_iterations} must be at least 1")
    if distill.beta and distill.ppo_coef:
        raise ConfigError(
            f"distill.beta = {distill.beta} lets the teacher act, but PPO (distill.ppo_coef = "
            f"{distill.ppo_coef}) needs actions of the student alone; set one of them to 0"
        )


def _check_preemption(config: Config) -> None:
    section = config.preemption
    urls = {"aws_url": section.aws_url, "gcp_url": section.gcp_url, "azure_url": section.azure_url}
    for key, url in urls.items():
        try:
            parts = urlsplit(url)
            usable = parts.scheme == "http" and bool(parts.hostname) and not parts.path.strip("/")
            usable = usable and (parts.port or 80) > 0
        except ValueError:
            usable = False
        if not usable:
            raise ConfigError(
                f"preemption.{key} = {url!r} must be http://HOST or http://HOST:PORT, without a path"
            )


def _check_metrics(config: Config) -> None:
    section = config.metrics
    if (section.cert_file is None) != (section.key_file is None):
        raise ConfigError(
            f"metrics.cert_file = {section.cert_file!r} and metrics.key_file = {section.key_file!r} go "
            "together: set both, or neither"
        )
    if section.client_ca_file is not None and section.cert_file is None:
        raise ConfigError(
            f"metrics.client_ca_file = {section.client_ca_file!r} needs TLS: set metrics.cert_file and "
            "metrics.key_file"
        )
    if (
        section.users_file is not None
        and section.cert_file is None
        and not is_loopback(section.bind)
    ):
        raise ConfigError(
            f"metrics.users_file = {section.users_file!r} without TLS would send passwords in clear to "
            f"metrics.bind = {section.bind!r}; set metrics.cert_file and metrics.key_file, or bind to "
            "127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
