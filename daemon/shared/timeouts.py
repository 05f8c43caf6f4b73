"""Every timeout, derived in one place from the root ``[membership] detect_s``."""

from dataclasses import dataclass

from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.errors import ConfigError


@dataclass(frozen=True)
class Timeouts:
    """Seconds. Each is set by its key where that is given, else derived as its string says."""

    detect_s: float
    """Root: silence for this long is a loss."""
    coalesce_s: float
    """Losses within this window are one change: 0.05."""
    probe_s: float
    """Bound of a probe of all members before a forced plan: min(0.2, detect/10)."""
    hang_s: float
    """Least silence of a worker that others wait for which is a hang: min(10, 2 x detect), at least 2."""
    join_debounce_s: float
    """Newcomers within this window enter together: detect/5."""
    group_init_s: float
    """Timeout while a group is being built: max(1, detect/5), plus 0.02 a member."""
    collective_s: float
    """Timeout of a collective once the group is built; the supervisor's release comes long before:
    24 x detect."""
    nccl_init_s: float
    """Bound of building NCCL's communicators, and of a call that waits for one: 0.6 x detect."""
    abort_s: float
    """Bound of ending NCCL's communicators, after which the process ends and restarts cold: detect."""
    store_s: float
    """Timeout of one store request of a worker: detect."""
    rebuild_bound_s: float
    """Most that a kill inside a rebuild may cost, on the one-second init timeout: 5 x group_init."""
    orphan_grace_s: float
    """A worker without supervisor leaves after this."""
    witness_s: float
    """A collective that ended within this time shows that all of its generation live: detect/5."""
    holder_wait_s: float
    """How long a restore waits for who holds something newer: orphan_grace + detect."""
    adopt_s: float
    """How long an adopted worker may take to say Hello to its new supervisor: detect."""
    relist_s: float
    """A node compares what it knows of the store with a listing this often: 12 x detect."""
    answer_s: float
    """How long a worker waits for the answer to a commit question: detect."""


def derive(config: Config, world_size: int = 2) -> Timeouts:
    """The timeouts of this configuration. Raises `ConfigError` when they nest wrongly."""
    detect_s = config.membership.detect_s
    group_init_s = max(1.0, detect_s / 5) + 0.02 * world_size
    debounce = config.membership.join_debounce_s
    hang = config.membership.hang_s
    timeouts = Timeouts(
        detect_s=detect_s,
        coalesce_s=0.05,
        probe_s=min(0.2, detect_s / 10),
        hang_s=max(2.0, min(10.0, 2 * detect_s)) if hang is None else hang,
        join_debounce_s=detect_s / 5 if debounce is None else debounce,
        group_init_s=group_init_s,
        collective_s=24 * detect_s,
        nccl_init_s=0.6 * detect_s,
        abort_s=detect_s,
        store_s=detect_s,
        rebuild_bound_s=5 * group_init_s,
        orphan_grace_s=config.membership.orphan_grace_s,
        witness_s=detect_s / 5,
        holder_wait_s=config.membership.orphan_grace_s + detect_s,
        adopt_s=detect_s,
        relist_s=12 * detect_s,
        answer_s=detect_s,
    )
    _check_nesting(timeouts)
    return timeouts


def _check_nesting(t: Timeouts) -> None:
    for low, low_s, high, high_s in (
        ("coalesce_s", t.coalesce_s, "membership.detect_s", t.detect_s),
        ("probe_s", t.probe_s, "membership.detect_s", t.detect_s),
        ("group_init_s", t.group_init_s, "collective_s", t.collective_s),
        ("hang_s", t.hang_s, "collective_s", t.collective_s),
        ("join_debounce_s", t.join_debounce_s, "collective_s", t.collective_s),
    ):
        if low_s >= high_s:
            raise ConfigError(
                f"timeouts nest wrongly: {low} = {low_s} s must be below {high} = {high_s} s; "
                f"raise membership.detect_s or lower {low}"
            )
