"""The configuration schema. Loading, merging and messages are in `configload`.

Every section is a frozen, keyword-only dataclass; the string under a field says what it is, with
its unit. A key that nothing reads does not stand here.
"""

from dataclasses import dataclass, field
from typing import Literal

from rallypoint.daemon.shared.envbackends import EMBEDDED


@dataclass(frozen=True, kw_only=True)
class JobSection:
    """What is trained, for how long, by how many workers."""

    name: str = "default"
    """Name of the job; part of the store's keys and of the default directory."""
    iterations: int | None = None
    """Stop after this iteration (absolute, not "more"). None: no bound."""
    env_steps: int | None = None
    """Stop at the first iteration that reaches this many global env steps. None: no bound."""
    seed: int = 1
    """Seed of every keyed random stream."""
    profile: str = "sonic"
    """Whose choices fill in what nobody else sets: ``sonic`` or ``rsl_rl``."""
    min_workers: int = 1
    """Below this many workers the job holds."""
    max_workers: int | None = None
    """Largest world size, of all nodes together. None: the slots of this node, which is the only one."""
    spares: int = 0
    """Warm workers that are kept out of the training, and let in at once when one is lost."""
    warm_start: str | None = None
    """Checkpoint whose parameters and statistics of observations a new job begins with; optimiser,
    counters and sampler begin anew. A job that has begun goes on from its own state. None: from scratch."""


@dataclass(frozen=True, kw_only=True)
class NodeSection:
    """This node: its addresses, slots and devices."""

    name: str = "local"
    """Name of this node, unique in the job; must be given with ``membership.backend = "etcd"``."""
    bind: str = "127.0.0.1"
    """IPv4 or IPv6 address that workers' store servers bind to."""
    advertise: str = "127.0.0.1"
    """Address under which other nodes reach this one."""
    interface: str = "lo"
    """Network interface for collectives (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME unless that is set); never
    guessed from a host name."""
    workers: int = 2
    """Slots on this node: one worker process each."""
    devices: tuple[int, ...] | None = None
    """CUDA device of each slot, all different; collectives then go through NCCL. None: the CPU."""
    fork_server: bool = True
    """Fork workers from a process that has imported what they need, so that one is replaced fast."""
    stop_grace_s: float = 30.0
    """How long a stop waits for workers to agree and checkpoint before it ends them."""


@dataclass(frozen=True, kw_only=True)
class MembershipSection:
    """How membership is kept, and how fast a loss is noticed."""

    backend: Literal["embedded", "etcd"] = "embedded"
    """Where membership lives: in this supervisor's memory, or in an etcd cluster."""
    endpoints: tuple[str, ...] = ()
    """``host:port`` or ``[IPv6 address]:port`` of each member of the etcd cluster."""
    ca_file: str | None = None
    """PEM file of the authority that signed etcd's certificates. None: no TLS."""
    cert_file: str | None = None
    """PEM file of this node's certificate for etcd."""
    key_file: str | None = None
    """PEM file of its private key."""
    user: str | None = None
    """User of etcd. None: none, or the common name of the certificate."""
    password_file: str | None = None
    """File whose first line is the user's password; read again for every new token."""
    detect_s: float = 5.0
    """Root timeout: silence for this long is a loss. The others are derived from it."""
    hang_s: float | None = None
    """A worker that others wait for and that is silent for this long hangs, and is ended; three times
    the longest silence measured in the same phase, where that is more. None: derived."""
    join_debounce_s: float | None = None
    """Newcomers that become ready within this window enter together. None: derived."""
    orphan_grace_s: float = 10.0
    """A worker that has lost its supervisor trains on for this long, then leaves."""
    quarantine_after: int = 6
    """A slot is quarantined when this many lives in a row crashed before they trained."""
    quarantine_cooldown_s: float = 300.0
    """A quarantined slot gets one more life after this long."""


@dataclass(frozen=True, kw_only=True)
class EnvSection:
    """What is simulated, and how envs are counted and grouped."""

    backend: str = EMBEDDED
    """Simulator backend: ``embedded``, an adapter of this project, the name that an installed
    distribution offers (entry points ``rallypoint.envs``), or ``module:factory``."""
    task: str = "quadruped-velocity"
    """Task of the backend."""
    overrides: tuple[str, ...] = ()
    """What the backend is told beside its task: ``name=value`` each, with a TOML value."""
    budget: Literal["per_rank", "global"] = "per_rank"
    """Whether ``num_envs`` counts envs per rank or over all ranks."""
    num_envs: int = 128
    """Envs per rank (``per_rank``) or in all (``global``)."""
    block: int = 8
    """Envs per env block: a multiple of 8 and of ``ppo.mini_batches``."""
    max_envs: int | None = None
    """Most envs one worker can hold. None: no bound."""
    backup: Literal["none", "node"] = "none"
    """What is left of the envs of a lost process: nothing, so that its share of the iteration is left
    out and they begin new episodes; or, ``node``, their rows, in shared memory of the node, so that
    others collect the same rollout again. Needs ``budget = "global"``."""


@dataclass(frozen=True, kw_only=True)
class PpoSection:
    """The algorithm: rollouts, updates, networks."""

    rollout_steps: int = 24
    """Env steps per iteration and env, T."""
    epochs: int = 5
    """Passes over a rollout, E."""
    mini_batches: int = 4
    """Mini-batches per epoch, M; each epoch makes M optimiser steps."""
    mini_batch_of: Literal["trajectories", "transitions"] = "trajectories"
    """What is shuffled into mini-batches: whole trajectories of envs, or single transitions."""
    permutation_scope: Literal["block", "rank"] = "block"
    """One permutation per env block, the same for every world size, or one over all that a rank has."""
    permutation_every: Literal["epoch", "iteration"] = "epoch"
    """A fresh permutation each epoch, or one per iteration for all of its epochs."""
    micro_batches: int = 1
    """Forward and backward passes that a mini-batch is split into, for less memory: gradients add up,
    and are reduced and clipped once."""
    gamma: float = 0.99
    """Discount per step."""
    lam: float = 0.95
    """Lambda of generalised advantage estimation."""
    time_out_bootstrap: Literal["pre_step", "final_obs"] = "pre_step"
    """Whose value goes on where the time limit ends an episode: that of the observation before its last
    step, or of the true last one, where the env gives it."""
    advantage_scope: Literal["global", "per_rank", "mini_batch"] = "global"
    """Whose moments advantages are standardised by: those of all ranks, of this rank's rollout, or of
    this rank's part of the mini-batch."""
    advantage_ddof: int = 1
    """What is subtracted from the count in the variance of advantages: 1 unbiased, 0 biased."""
    clip: float = 0.2
    """Clip range of the policy ratio and of the value step."""
    value_loss: Literal["clipped", "squared"] = "clipped"
    """The greater of the squared errors with and without the value step clipped, or the squared error;
    without a factor 1/2."""
    learning_rate: float = 1e-3
    """Learning rate at the start."""
    learning_rate_bounds: tuple[float, float] = (1e-5, 1e-2)
    """Least and greatest learning rate of the adaptive rule."""
    learning_rate_decision: Literal["each_rank", "rank_0"] = "each_rank"
    """Each rank decides in double precision from the same KL, or rank 0 does and sends the learning
    rate as a float32: with more than one rank it is rounded to one."""
    desired_kl: float | None = 0.01
    """Target KL of the adaptive learning rate. None: constant learning rate."""
    kl_form: Literal["exact", "sonic"] = "exact"
    """Exact (0 for identical policies), or with SONIC's 1e-5 beside the ratio of standard deviations:
    then the first mini-batch of every iteration raises the learning rate."""
    max_grad_norm: float | None = 1.0
    """Norm that the global gradient is clipped to. None: no clipping."""
    grad_clip: Literal["joint", "separate"] = "joint"
    """Clip the gradient of actor and critic together, or each by its own norm."""
    value_coef: float = 1.0
    """Weight of the value loss."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus."""
    hidden: tuple[int, ...] = (256, 128)
    """Hidden layer widths of the actor."""
    critic_hidden: tuple[int, ...] | None = None
    """Hidden layer widths of the critic. None: those of the actor."""
    activation: Literal["elu", "silu", "relu", "tanh"] = "elu"
    """Activation between layers."""
    noise: Literal["std", "log_std"] = "log_std"
    """The free parameter of the action noise: its standard deviation, or the logarithm of it."""
    init_std: float = 1.0
    """Standard deviation of the action noise at the start."""
    std_bounds: tuple[float, float] = (0.05, 2.0)
    """Clamp of the action noise."""
    std_clamp: Literal["in_place", "forward"] = "in_place"
    """Put the parameter back into the bounds after each step, or clamp what the forward pass takes of
    it (no gradient outside of the bounds)."""
    normalise_actor: bool = True
    """Standardise what the actor sees by global running statistics, frozen within an iteration."""
    normalise_critic: bool = True
    """Likewise for the critic; one statistic where both see the same observations."""
    normaliser_form: Literal["variance", "std"] = "variance"
    """``(x - mean) / sqrt(variance + 1e-5)``, or ``(x - mean) / (std + 1e-2)``."""
    normaliser_clip: float | None = 5.0
    """Clamp of normalised observations. None: no clamp."""
    normaliser_prior: int = 0
    """Samples of mean 0 and variance 1 that the statistics start with, counted once in all."""
    normaliser_update: Literal["iteration", "sonic_epochs"] = "iteration"
    """When statistics take in observations: once, at the end of an iteration. Or as SONIC does, for
    fidelity: before each mini-batch those in it, so that each counts once per epoch."""
    dtype: Literal["float32", "float64"] = "float32"
    """Number type of observations, rewards, noise, rollout, networks and losses."""
    reduction: Literal["ddp", "ordered"] = "ddp"
    """How sums over ranks are made. ``ordered``: per env block, in the order of the blocks, so that no
    bit depends on the number of workers; slow, on the CPU only, for tests and debugging."""
    autocast: Literal["bfloat16"] | None = None
    """Run the networks in this precision, in rollouts and updates alike; parameters, losses and statistics
    keep ``dtype``, which must be float32. None: off."""
    compile: Literal["inductor", "aot_eager"] | None = None
    """Backend of ``torch.compile`` for the networks. None: off."""


@dataclass(frozen=True, kw_only=True)
class SamplerSection:
    """Adaptive motion sampling, for tasks that follow a library of motions."""

    kind: Literal["sonic", "ema", "uniform"] = "sonic"
    """By failure rate (``sonic``), by a running mean of failure counts (``ema``), or by frames alone."""
    uniform: float = 0.1
    """Part that is spread evenly over bins; with ``ema`` a count of failures that is."""
    cap_ratio: float = 50.0
    """``sonic``: a bin's failure rate is cut at this many times the mean."""
    alpha: float = 0.001
    """``ema``: weight of an iteration's failure counts."""
    bin_cap: float | None = None
    """Greatest probability of a bin. None: no bound."""
    clip_cap: float | None = None
    """Greatest probability of all bins of a clip together. None: no bound."""
    sonic_mean_every: int | None = None
    """SONIC's merge, for fidelity: after every this many iterations (SONIC: 200) the counters are the
    mean over ranks, so that an event counts 1 / world size. None: sums, every iteration."""


@dataclass(frozen=True, kw_only=True)
class AuxSection:
    """Auxiliary losses of a policy that acts through a latent."""

    latent: int | None = None
    """Size of the latent between encoder and action decoder. None: the policy has none, and no auxiliary
    loss."""
    privileged_share: float = 0.5
    """Share of the envs in which the encoder of the critic's observations drives the policy, drawn for
    each env and iteration."""
    reconstruction_coef: float = 0.01
    """Weight of reconstructing what an encoder sees, where it drives."""
    latent_coef: float = 1.0
    """Weight of the distance of the two latents, where the privileged encoder drives."""
    scale: float = 1.0
    """Weight of all of them together."""


@dataclass(frozen=True, kw_only=True)
class DistillSection:
    """Learning from a teacher: DAgger, alone or with PPO."""

    teacher: str | None = None
    """Checkpoint of the teacher: a checkpoint, a directory of checkpoints, or a run's directory (the
    newest that verifies). None: no distillation."""
    coef: float = 1.0
    """Weight of the squared distance to the teacher's action mean."""
    ppo_coef: float = 0.0
    """Weight of PPO's loss beside it."""
    beta: float = 0.0
    """Share of the envs in which the teacher acts, drawn for each env and iteration; 0 with PPO, whose
    actions must be the student's own."""
    beta_iterations: int | None = None
    """``beta`` falls linearly to 0 over this many iterations. None: it stays."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """Where and how often the committed state is kept."""

    url: str | None = None
    """Where checkpoints go: a local directory, or ``s3://``, ``gs://`` or ``az://`` and a path, which need
    the extra of that name. None: ``checkpoints`` below the run's directory."""
    credentials_file: str | None = None
    """JSON object with arguments of the URL's fsspec backend (keys, tokens, an endpoint), read again for
    every operation; a name without a slash is a systemd credential. None: what the backend finds."""
    every_iterations: int = 50
    """Commit a checkpoint every this many iterations."""
    every_s: float | None = None
    """Also commit when this many seconds have passed since the last. None: no."""
    keep_last: int = 3
    """How many verified checkpoints to keep."""
    keep_every: int | None = None
    """Also keep those of iterations that are multiples of this. None: no."""
    keep_best: int = 0
    """Also keep this many of the best by ``keep_best_metric``."""
    keep_best_metric: str = "episode_return_mean"
    """A figure of the iteration, by the name that the journal has it under."""
    keep_best_order: Literal["greatest", "least"] = "greatest"
    """Which of its values are the best."""
    local_every_iterations: int | None = None
    """Also commit one every this many iterations to ``checkpoints`` below the run's directory, on the disk
    of the node that rank 0 is on; a restore takes the newest of both. Needs ``url``. None: no."""
    local_keep_last: int = 3
    """How many verified checkpoints to keep there."""
    env_rows: bool = False
    """Write the rows of all envs too, so that a resume goes on with their episodes instead of new ones.
    Needs ``env.backup = "node"``."""

    def credentials_for(self, url: str) -> str | None:
        """``credentials_file``, for another job's checkpoint at a URL of the same backend."""
        same = url.partition("://")[0] == (self.url or "").partition("://")[0]
        return self.credentials_file if same else None


@dataclass(frozen=True, kw_only=True)
class MetricsSection:
    """The HTTP server of the supervisor."""

    bind: str = "127.0.0.1"
    """Address of /metrics, /healthz and /readyz."""
    port: int = 9105
    """Port of /metrics; 0 picks a free one."""
    cert_file: str | None = None
    """PEM file of the server's certificate (and the chain above it). None: no TLS. Files are read again
    when they change."""
    key_file: str | None = None
    """PEM file of its private key, not encrypted."""
    client_ca_file: str | None = None
    """PEM file of the authority that clients need a certificate of, for whatever they ask. None: they need
    none."""
    users_file: str | None = None
    """Who may read /metrics: a line ``NAME:HASH`` each, with a bcrypt hash, as ``htpasswd -B`` writes them;
    ``#`` begins a comment. None: everybody."""


@dataclass(frozen=True, kw_only=True)
class PreemptionSection:
    """Who says that this machine is about to be taken away."""

    sources: tuple[Literal["aws", "gcp", "azure", "slurm", "kubernetes", "signal"], ...] = ()
    """What counts as a notice: what the metadata service of a cloud says; with ``slurm``, ``kubernetes``
    or ``signal`` SIGTERM and SIGUSR1, with ``node.stop_grace_s`` left. Empty: nothing; SIGTERM drains."""
    aws_url: str = "http://169.254.169.254"
    """Metadata service of AWS; over IPv6 ``http://[fd00:ec2::254]``. Never asked through a proxy."""
    gcp_url: str = "http://metadata.google.internal"
    """Metadata server of Google Compute Engine."""
    azure_url: str = "http://169.254.169.254"
    """Metadata service of Azure."""


@dataclass(frozen=True, kw_only=True)
class CurvesSection:
    """Curves of committed iterations; exactly one writer, no point twice, none missing."""

    tensorboard: bool = True
    """Write TensorBoard event files."""
    directory: str | None = None
    """Directory of the event files; with several nodes one that all share. None: ``curves`` below the
    run's directory."""
    wandb: bool = False
    """Also feed Weights & Biases; needs the extra ``rallypoint[wandb]``."""
    wandb_project: str = "rallypoint"
    """Its project."""
    wandb_mode: Literal["online", "offline"] = "online"
    """Offline: only write its files, below the run's directory."""


@dataclass(frozen=True, kw_only=True)
class LogSection:
    """Log of the supervisor, output files of workers."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is logged."""
    format: Literal["auto", "json", "console"] = "auto"
    """JSON lines, or coloured text; ``auto`` takes text on a terminal."""
    worker_file_bytes: int = 8 * 2**20
    """A worker's output file is cut past this size; as much of what came before is kept. So are those of
    the fork server and of the feed of Weights & Biases."""
    worker_files: int = 5
    """Lives of each slot whose output is kept, the present one included."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration of one job on one node."""

    job: JobSection = field(default_factory=JobSection)
    node: NodeSection = field(default_factory=NodeSection)
    membership: MembershipSection = field(default_factory=MembershipSection)
    env: EnvSection = field(default_factory=EnvSection)
    ppo: PpoSection = field(default_factory=PpoSection)
    sampler: SamplerSection = field(default_factory=SamplerSection)
    aux: AuxSection = field(default_factory=AuxSection)
    distill: DistillSection = field(default_factory=DistillSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    metrics: MetricsSection = field(default_factory=MetricsSection)
    preemption: PreemptionSection = field(default_factory=PreemptionSection)
    curves: CurvesSection = field(default_factory=CurvesSection)
    log: LogSection = field(default_factory=LogSection)
