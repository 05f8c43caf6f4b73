"""Which URLs checkpoints can go to, and what is said of the others."""

import importlib.util
import logging
from pathlib import Path

import pytest

from rallypoint.checkpointing.errors import UnsupportedUrl
from rallypoint.checkpointing.objects import PACKAGES
from rallypoint.checkpointing.opening import open_storage
from rallypoint.checkpointing.store import CheckpointStore
from rallypoint.daemon.shared.errors import ConfigError
from tests.checkpointing.samples import commit


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "file://relative", "simplecache::s3://b/x", "s3://", "memory:///", ""]
)
def test_a_url_of_another_kind_is_a_configuration_error(url: str) -> None:
    with pytest.raises(UnsupportedUrl, match="is not supported; give a local directory") as error:
        open_storage(url)
    assert isinstance(error.value, ConfigError)
    assert repr(url) in str(error.value)


def test_a_url_with_credentials_is_refused_and_not_repeated() -> None:
    with pytest.raises(UnsupportedUrl, match="must not hold credentials") as error:
        open_storage("s3://user:password@bucket/x")
    assert "password" not in str(error.value)


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("az", "adlfs")])
def test_a_backend_that_is_not_installed_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, scheme: str, package: str
) -> None:
    installed = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else installed(name)
    )
    with pytest.raises(UnsupportedUrl, match=rf"pip install 'rallypoint\[{scheme}\]'"):
        open_storage(f"{scheme}://bucket/x")


def test_a_file_url_is_the_directory(tmp_path: Path) -> None:
    info = commit(CheckpointStore(f"file://{tmp_path}/x"), 1)
    assert info.path.startswith(f"{tmp_path}/x/iteration-")


def test_a_url_whose_second_slash_is_missing_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedUrl, match=r"s3:/… is neither a path nor a URL.* s3://") as error:
        open_storage("s3:/user:password@bucket/x")
    assert "password" not in str(error.value)
    assert open_storage("./s3:/bucket/x").root.endswith("/s3:/bucket/x")


def test_what_a_backend_logs_beside_what_it_raises_is_not_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for package in PACKAGES.values():
        logging.getLogger(package).exception("out of retries")
    assert capfd.readouterr().err == ""
