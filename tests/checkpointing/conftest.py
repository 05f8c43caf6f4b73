"""A place for checkpoints on each kind of storage."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rallypoint.checkpointing.opening import open_storage
from rallypoint.checkpointing.storage import Storage
from tests.fakes.object_stores import ObjectStore, azure_store, gcs_store, s3_store

KINDS = ("local", "memory", "s3", "gs", "az")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A server of the S3 API."""
    with s3_store(tmp_path_factory.mktemp("s3")) as store:
        yield store


@pytest.fixture(scope="session")
def gs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A server of the Google Cloud Storage API."""
    with gcs_store(tmp_path_factory.mktemp("gs")) as store:
        yield store


@pytest.fixture(scope="session")
def az(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A server of the Azure Blob Storage API."""
    with azure_store(tmp_path_factory.mktemp("az")) as store:
        yield store


@pytest.fixture(params=KINDS)
def open_place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Storage]:
    """Opens one place, which nobody has used yet, as often as wanted: as many writers do."""
    kind: str = request.param
    if kind in ("local", "memory"):
        url = str(tmp_path / "a" / "b") if kind == "local" else f"memory://{uuid.uuid4()}"
        return lambda: open_storage(url)
    server: ObjectStore = request.getfixturevalue(kind)
    url = server.place()
    return lambda: open_storage(url, str(server.credentials))
