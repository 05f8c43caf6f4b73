"""Unix sockets at paths of any length."""

import stat
from pathlib import Path

import pytest

from rallypoint.daemon.shared import unixsocket


@pytest.mark.parametrize("depth", [0, 20])
def test_both_sides_meet_at_the_path_however_long_it_is(tmp_path: Path, depth: int) -> None:
    directory = tmp_path.joinpath(*["a-long-name"] * depth)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "control.sock"
    path.write_text("left by a dead server")
    with unixsocket.listen(path) as server:
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with unixsocket.connect(path, 5.0) as client:
            accepted, _ = server.accept()
            with accepted:
                client.sendall(b"hello")
                assert accepted.recv(5) == b"hello"


def test_connecting_to_nobody_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        unixsocket.connect(tmp_path / "nobody.sock", 1.0)
