"""The membership benchmark: its arithmetic, and a real small run."""

import json
from pathlib import Path

import pytest

from rallypoint.daemon import cli
from rallypoint.ops.bench import membershipreport
from rallypoint.ops.bench.membership import KINDS, Loss, Size, Traffic
from tests.fakes.etcd_server import system_binaries

IDLE = Traffic(0.0, 0.0, 100.0, 200.0, 0.01)


def loss(planned_s: float, requests: float) -> Loss:
    traffic = Traffic(requests, 30.0, 1000.0, 9000.0, 0.1)
    return Loss("node dies", "n0001", 0.1, planned_s, planned_s + 0.1, 0.05, traffic, traffic)


def test_traffic_is_what_grew_less_what_idle_takes() -> None:
    before = {"grpc_server_handled_total/Put": 5.0, "process_cpu_seconds_total": 1.0}
    after = {
        "grpc_server_handled_total/Put": 8.0,
        "grpc_server_handled_total/Txn": 2.0,
        "grpc_server_msg_sent_total/LeaseKeepAlive": 90.0,
        "etcd_network_client_grpc_sent_bytes_total": 1000.0,
        "process_cpu_seconds_total": 1.01,
    }
    found = Traffic.between(before, after)
    assert (found.requests, found.watch_messages) == (5.0, 0.0)
    less = found.less(IDLE, 2.0)
    assert (less.requests, less.bytes_out) == (5.0, 600.0)
    assert less.bytes_in == less.cpu_s == 0.0, "never below none"


def test_a_document_sums_up_by_kind() -> None:
    size = Size(10, 1, losses=[loss(0.2, 10.0), loss(0.4, 30.0)], node_cpu=0.004, idle=IDLE)
    document = membershipreport.document([size], {"seed": 1})
    assert json.loads(json.dumps(document)) == document
    (found,) = document["sizes"]
    assert found["seconds"]["node dies"]["planned_s"]["p50"] == pytest.approx(0.3)
    assert found["seconds"]["lease ends"]["planned_s"]["n"] == 0
    assert found["traffic"]["loss"]["requests"] == 20.0
    text = membershipreport.text(document)
    assert "node dies: everybody has the plan" in text
    assert "lease ends" not in text
    assert "for a loss (p50): 5.0 ms" in text
    assert "0.40 % of a CPU" in text


@pytest.mark.parametrize("wrong", [("--nodes", "2"), ("--losses", "0"), ("--idle-s", "0")])
def test_too_little_is_refused(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "membership", *wrong]) == 2
    assert "at least 3 nodes" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.faults
def test_everybody_learns_of_each_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    system_binaries()
    output = tmp_path / "membership.json"
    arguments = ["--nodes", "10", "--losses", "1", "--idle-s", "1", "--output", str(output)]
    assert cli.main(["bench", "membership", *arguments]) == 0
    (size,) = json.loads(output.read_text())["sizes"]
    assert [one["kind"] for one in size["losses"]] == list(KINDS)
    for one in size["losses"]:
        assert 0 < one["published_s"] <= one["planned_s"] <= one["marked_s"]
        assert one["traffic"]["requests"] >= 10, "each of the nine others writes what it has formed"
        assert one["traffic"]["bytes_out"] > 9 * size["plan_bytes"] / 2
    assert size["node_cpu"] > 0
    assert "leader dies: everybody has the plan" in capsys.readouterr().out
