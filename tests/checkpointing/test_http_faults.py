"""Faults of real HTTP between a writer and an object store."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.checkpointing.store import CheckpointStore
from tests.checkpointing.samples import assert_state, commit, newest
from tests.fakes.http_proxy import HttpProxy, What, http_proxy
from tests.fakes.object_stores import ObjectStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(params=["s3", "gs"])
def server(request: pytest.FixtureRequest) -> ObjectStore:
    """A real server, without anything in between."""
    store: ObjectStore = request.getfixturevalue(request.param)
    return store


@pytest.fixture
def proxy(server: ObjectStore) -> Iterator[HttpProxy]:
    """What lies between it and the writer."""
    with http_proxy(server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def stores(
    server: ObjectStore, proxy: HttpProxy, tmp_path: Path
) -> tuple[CheckpointStore, CheckpointStore]:
    """One store through the proxy, and one at the same place without; iteration 1 is committed."""
    options = {**server.options(), "endpoint_url": proxy.endpoint}
    if server.scheme == "s3":
        options["config_kwargs"] = {"retries": {"max_attempts": 1}}
    credentials = tmp_path / "proxy.json"
    credentials.write_text(json.dumps(options))
    url = server.place()
    through = CheckpointStore(url, credentials_file=str(credentials))
    commit(through, 1)
    return through, CheckpointStore(url, credentials_file=str(server.credentials))


def upload(proxy: HttpProxy, what: What, number: int) -> None:
    """Do this to the first try of upload ``number``: 1 are the tensors, 2 is the manifest."""
    uploads: list[str] = []

    def decide(method: str, path: str) -> What:
        if method == "PUT" or (method == "POST" and "/upload/" in path):
            uploads.append(path)
            return what if len(uploads) == number else "pass"
        return "pass"

    proxy.decide = decide


@pytest.mark.parametrize(
    ("what", "number"), [("lose", 1), ("lose", 2), ("refuse", 2), ("unavailable", 2)]
)
def test_a_put_without_an_answer_is_tried_again_and_is_ours(
    stores: tuple[CheckpointStore, CheckpointStore], proxy: HttpProxy, what: What, number: int
) -> None:
    """Lost: it was carried out, so that the second try finds the name taken, by itself."""
    through, direct = stores
    upload(proxy, what, number)
    info = commit(through, 2)
    assert [fired for fired, _ in proxy.fired] == [what]
    direct.verify(info)
    assert_state(newest(direct), 2)
