"""Addresses of a node that are not its own are refused before anything starts."""

from pathlib import Path

import pytest

from rallypoint.daemon import cli
from rallypoint.daemon.executors.addresses import require_addresses
from rallypoint.daemon.shared.config import NodeSection
from rallypoint.daemon.shared.errors import ConfigError

WRONG = {
    "node.bind=192.0.2.1": "node.bind = '192.0.2.1': cannot listen there: Cannot assign requested address",
    "node.bind=": "node.bind = '': cannot listen there: it is empty",
    "node.bind=2001:db8::1": "node.bind = '2001:db8::1': cannot listen there: ",
    "node.interface=nope0": "node.interface = 'nope0': no interface 'nope0' is on this machine; there are lo",
    "node.advertise=": "node.advertise = '': not an address that can be reached: it is empty",
    "node.advertise=10.0.0.1:5000": "node.advertise = '10.0.0.1:5000': not an address",
    "node.advertise=a host": "node.advertise = 'a host': not an address",
    f"node.advertise={'a' * 64}": "not an address that can be reached",
}


@pytest.mark.parametrize("setting", WRONG)
def test_what_is_not_this_nodes_is_refused_with_exit_code_2(
    setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert cli.main(["run", "--dir", str(run), "--set", setting]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert WRONG[setting] in said[0]
    assert not (run / "state.json").exists()


def test_literals_of_both_kinds_and_names_pass() -> None:
    require_addresses(NodeSection())
    require_addresses(NodeSection(bind="localhost", advertise="localhost"))
    require_addresses(NodeSection(bind="0.0.0.0", advertise="192.0.2.1"))  # noqa: S104 - asked for
    require_addresses(NodeSection(advertise="2001:db8::1"))


def test_one_of_several_interfaces_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"node\.interface = 'lo,nope0': no interface 'nope0'"):
        require_addresses(NodeSection(interface="lo,nope0"))
