"""Every timeout from one root."""

import pytest

from rallypoint.daemon.shared import timeouts
from rallypoint.daemon.shared.config import Config, MembershipSection
from rallypoint.daemon.shared.errors import ConfigError


def test_rule_10_derived_values_follow_the_root_and_given_ones_stay() -> None:
    default = timeouts.derive(Config())
    assert (default.detect_s, default.probe_s, default.join_debounce_s) == (5.0, 0.2, 1.0)
    section = MembershipSection(detect_s=1.0, join_debounce_s=0.7)
    given = timeouts.derive(Config(membership=section), world_size=50)
    assert (given.probe_s, given.join_debounce_s, given.group_init_s) == (0.1, 0.7, 2.0)


def test_rule_10_wrong_nesting_is_refused_with_both_values() -> None:
    section = MembershipSection(detect_s=0.05)
    with pytest.raises(
        ConfigError, match=r"coalesce_s = 0\.05 s must be below membership\.detect_s"
    ):
        timeouts.derive(Config(membership=section))
