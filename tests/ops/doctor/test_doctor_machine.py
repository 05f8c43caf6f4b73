"""`rallypoint doctor` on a machine with GPUs, or with something wrong: programs of the driver and of
torch in the place of the real ones, file systems, interfaces and servers that are really so."""

import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from rallypoint.ops.doctor import devices, host
from rallypoint.ops.doctor.command import COMMAND
from tests.fakes.command import run_command
from tests.fakes.etcd_server import EtcdCluster, cluster
from tests.fakes.proxy import Proxy, lossy_proxy

SETTINGS: Final = ("--metrics-port", "0", "--set", "env.task=pointmass", "--workers", "1")
ON_A_GPU: Final = ("--set", "node.devices=[0]")

Findings = list[dict[str, Any]]


def doctor(capsys: pytest.CaptureFixture[str], only: str, *options: str) -> tuple[int, Findings]:
    """Exit code and findings; whatever is wrong has a remedy, whatever is not has none."""
    given = ("--only", only, "--json", *SETTINGS, *options)
    code = run_command(COMMAND, *given)
    found: Findings = json.loads(capsys.readouterr().out)
    assert all(bool(f["remedy"]) == (f["level"] != "pass") for f in found), found
    assert code == any(f["level"] == "fail" for f in found)
    return code, found


def program(path: Path, text: str) -> None:
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)


# --- the driver ------------------------------------------------------------------------------------

SMI: Final = """
import sys
query = next(word.partition("=")[2] for word in sys.argv if word.startswith("--query-gpu="))
assert "--format=csv,noheader,nounits" in sys.argv
says = {{"index": {index!r}, "name": "NVIDIA H200", "driver_version": "570.86.15",
         "temperature.gpu": {hot!r}, "memory.used": "3", "memory.total": "143771",
         "ecc.errors.uncorrected.volatile.total": {errors!r}, "remapped_rows.pending": "No"}}
print(", ".join(says[name] for name in query.split(",")))
"""


@pytest.mark.parametrize(
    ("index", "hot", "errors", "level", "words"),
    [
        ("0", "41", "0", "pass", "GPU 0: NVIDIA H200, driver 570.86.15, 41 °C"),
        ("0", "97", "0", "warn", "97 °C"),
        ("0", "41", "3", "fail", "3 uncorrected memory errors"),
        ("1", "41", "0", "fail", "GPU 0 of node.devices is not there; there are 1"),
    ],
)
def test_the_driver_is_asked_about_each_gpu(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    index: str,
    hot: str,
    errors: str,
    level: str,
    words: str,
) -> None:
    program(tmp_path / "nvidia-smi", SMI.format(index=index, hot=hot, errors=errors))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    _, (finding,) = doctor(capsys, "gpu", *ON_A_GPU)
    assert finding["level"] == level
    assert words in finding["text"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys; sys.exit(9)", "non-zero exit status 9"),
        ("import time; time.sleep(60)", "timed out"),
    ],
)
def test_a_driver_that_fails_or_hangs_is_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    words: str,
) -> None:
    program(tmp_path / "nvidia-smi", text)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(devices, "_SMI_S", 0.1 if "sleep" in text else 60.0)
    code, (finding,) = doctor(capsys, "gpu", *ON_A_GPU)
    assert code == 1
    assert words in finding["text"]
    assert "NVIDIA driver" in finding["remedy"]


# --- torch, NCCL, the simulator ------------------------------------------------------------------------

FOUND: Final = {"torch": "2.13.0", "cuda": "12.8", "devices": 1, "nccl": "2.28.9"}


@pytest.mark.parametrize(
    ("text", "levels", "words"),
    [
        (f"print('''{json.dumps(FOUND)}''')", ["pass", "pass"], "NCCL 2.28.9"),
        (f"print('''{json.dumps(FOUND | {'nccl': None})}''')", ["pass", "fail"], "is not there"),
        ("raise AssertionError('cuda:0 computes wrongly')", ["fail"], "cuda:0 computes wrongly"),
        ("import sys; sys.exit(5)", ["fail"], "exit code 5"),
        ("import time; time.sleep(60)", ["fail"], "did not answer within 0.1 s"),
    ],
)
def test_torch_and_nccl_are_tried_in_a_process_of_their_own(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    levels: list[str],
    words: str,
) -> None:
    """A program in the place of Python says what torch would."""
    program(tmp_path / "python", text)
    monkeypatch.setattr(devices, "sys", SimpleNamespace(executable=str(tmp_path / "python")))
    monkeypatch.setattr(devices, "_TORCH_S", 0.1 if "sleep" in text else 60.0)
    _, found = doctor(capsys, "torch", *ON_A_GPU)
    assert [finding["level"] for finding in found] == levels
    assert words in found[-1]["text"]


@pytest.mark.slow
def test_devices_that_torch_does_not_have_fail(capsys: pytest.CaptureFixture[str]) -> None:
    """The real torch; no machine has a GPU of this number."""
    code, (finding,) = doctor(capsys, "torch", "--set", "node.devices=[99]")
    assert code == 1
    assert finding["check"] == "torch"


@pytest.mark.slow
def test_a_simulator_that_cannot_be_imported_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_sim.py").write_text("import a_library_that_is_not_here\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    code, (finding,) = doctor(capsys, "simulator", "--set", "env.backend=broken_sim:Env")
    assert code == 1
    assert "a_library_that_is_not_here" in finding["text"]


# --- the machine -------------------------------------------------------------------------------------


@contextmanager
def mounted(place: Path, *options: str) -> Iterator[Path]:
    """A file system in memory."""
    if os.geteuid() != 0:
        pytest.skip("file systems are mounted by root")
    place.mkdir()
    command = ["/bin/mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(place)]
    if subprocess.run(command, check=False, capture_output=True, timeout=30).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["/bin/umount", "-l", str(place)], check=True, timeout=30)


@pytest.mark.parametrize(
    ("options", "level", "words"),
    [
        (("size=512m",), "fail", "0.5 GiB free of 0.5"),
        (("size=5g",), "warn", "5.0 GiB free of 5.0"),
        (("size=20g", "ro"), "fail", "is not writable"),
    ],
)
def test_room_and_permission_on_the_disk(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    level: str,
    words: str,
) -> None:
    with mounted(tmp_path / "disk", *options) as place:
        _, found = doctor(capsys, "disk", "--dir", str(place / "runs" / "walk"))
    (finding,) = (f for f in found if f["level"] != "pass")
    assert finding["level"] == level
    assert words in finding["text"]


@pytest.mark.parametrize(
    ("state", "level", "words"),
    [(0, "pass", "synchronised"), (5, "warn", "not synchronised"), (-1, "warn", "adjtimex: ")],
)
def test_the_clock(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    state: int,
    level: str,
    words: str,
) -> None:
    """The kernel's answer is given: a test does not touch the clock of its machine."""
    kernel = SimpleNamespace(adjtimex=lambda buffer: state)
    monkeypatch.setattr("ctypes.CDLL", lambda name, use_errno: kernel)
    code, (finding,) = doctor(capsys, "clock")
    assert (code, finding["level"]) == (0, level), "no decision depends on it"
    assert finding["text"].startswith(words)


def test_shared_memory_matters_where_nccl_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted(tmp_path / "shm", "size=64m") as small:
        monkeypatch.setattr(host, "_SHM", small)
        assert doctor(capsys, "shared memory")[1][0]["level"] == "pass"
        _, (finding,) = doctor(capsys, "shared memory", *ON_A_GPU)
    assert (finding["level"], finding["text"]) == ("warn", "64 MiB free in /dev/shm")


@pytest.mark.parametrize(("bytes_", "level"), [(64 * 1024, "warn"), (-1, "pass")])
def test_infiniband_wants_memory_that_may_be_locked(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    bytes_: int,
    level: str,
) -> None:
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(host, "_FABRIC", tmp_path)
    limits = {resource.RLIMIT_NOFILE: 65536, resource.RLIMIT_MEMLOCK: bytes_}
    monkeypatch.setattr("resource.getrlimit", lambda what: (limits[what], limits[what]))
    _, found = doctor(capsys, "limits", *ON_A_GPU)
    assert [f["level"] for f in found] == ["pass", level]
    assert found[1]["text"].endswith("memory may be locked")


@pytest.mark.slow
def test_an_interface_that_is_down_fails() -> None:
    """The loopback interface of a new network namespace."""
    ip = shutil.which("ip")
    if os.geteuid() != 0 or ip is None:
        pytest.skip("network namespaces need root and iproute2")
    name = f"rpdoctor{os.getpid()}"
    subprocess.run([ip, "netns", "add", name], check=True, timeout=30)
    code = "import sys; from rallypoint.daemon.cli import main; sys.exit(main(sys.argv[1:]))"
    try:
        done = subprocess.run(
            [
                *(ip, "netns", "exec", name, sys.executable, "-c", code, "doctor", *SETTINGS),
                *("--only", "interface", "--json", "--set", "node.interface=lo"),
            ],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    finally:
        subprocess.run([ip, "netns", "del", name], check=True, timeout=30)
    (finding,) = json.loads(done.stdout)
    assert (done.returncode, finding["level"]) == (1, "fail")
    assert (finding["text"], finding["remedy"]) == (
        *("node.interface = 'lo' is down", "ip link set lo up"),
    )


# --- etcd that is slow ---------------------------------------------------------------------------------


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with cluster(tmp_path / "etcd") as servers:
        yield servers


@contextmanager
def slowed(target: str, delay_s: float) -> Iterator[str]:
    """The address of a way to a server on which each answer is late."""
    ready, over = threading.Event(), threading.Event()
    found: list[Proxy] = []

    async def serve() -> None:
        async with lossy_proxy(target) as proxy:
            proxy.delay_s = delay_s
            found.append(proxy)
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(30)
        yield found[0].endpoint
    finally:
        over.set()
        thread.join(30)


@pytest.mark.slow
def test_an_etcd_that_is_slow_is_said_before_leases_run_out(
    capsys: pytest.CaptureFixture[str], etcd: EtcdCluster
) -> None:
    with slowed(etcd.endpoints[0], 0.25) as endpoint:
        slow = ("--set", f'membership.endpoints=["{endpoint}"]', "--set", "membership.detect_s=2.0")
        _, found = doctor(capsys, "etcd", *etcd.settings, *slow)
    assert found[0]["level"] != "pass", "a third of what a try has, 2 s / 3, is 0.22 s"
    assert found[0]["text"].startswith(endpoint)
