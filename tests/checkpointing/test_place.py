"""What a supervisor is told about a checkpoint URL, and backends that do not do what they say."""

import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest

from rallypoint.checkpointing.credentials import DIRECTORY_VARIABLE, Credentials
from rallypoint.checkpointing.objects import FsspecStorage
from rallypoint.checkpointing.place import main, survey
from rallypoint.checkpointing.probe import refuses_second_create
from rallypoint.checkpointing.store import CheckpointStore
from rallypoint.daemon.shared.survey import Survey
from tests.checkpointing.samples import commit
from tests.fakes.object_stores import BUCKET, SECRET, ObjectStore


class OpensExclusively(FsspecStorage):
    """Creates by ``open("xb")``, the other way to say it."""

    def put_if_absent(self, directory: str, name: str, data: bytes) -> None:
        fs, path = self._locate(directory, name)
        with fs.open(path, "xb") as file:
            file.write(data)


def obstore_storage(s3: ObjectStore, tmp_path: Path) -> FsspecStorage:
    """Ours on obstore's backend, which is registered for a scheme of its own."""
    from obstore.fsspec import FsspecStore

    class Obstore(FsspecStore):
        protocol = "obs"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("use_listings_cache", None)
            super().__init__("s3", *args, **kwargs)

    fsspec.register_implementation("obs", Obstore, clobber=True)
    options = {
        "config": {
            "endpoint": s3.endpoint,
            "access_key_id": "emulator",
            "secret_access_key": SECRET,
            "region": "us-east-1",
        },
        "client_options": {"allow_http": True},
    }
    credentials = tmp_path / "obs.json"
    credentials.write_text(json.dumps(options))
    return FsspecStorage(s3.place().replace("s3://", "obs://"), Credentials(str(credentials)))


def test_obstores_backend_overwrites_and_is_caught(s3: ObjectStore, tmp_path: Path) -> None:
    storage = obstore_storage(s3, tmp_path)
    assert refuses_second_create(storage) == (
        f"{storage.root}: creating a file that exists overwrote it"
    )
    found = survey(storage)
    assert (found.verdict, found.words) == ("unconditional", refuses_second_create(storage))


def test_exclusive_open_of_gcsfs_overwrites_and_is_caught(gs: ObjectStore) -> None:
    storage = OpensExclusively(gs.place(), Credentials(str(gs.credentials)))
    assert "overwrote it" in refuses_second_create(storage)
    assert gs.files(storage.root) == []


def test_exclusive_open_of_s3fs_is_conditional(s3: ObjectStore) -> None:
    """So the probe does not cry wolf."""
    storage = OpensExclusively(s3.place(), Credentials(str(s3.credentials)))
    assert refuses_second_create(storage) == ""


def test_even_an_unconditional_backend_refuses_what_it_can_see(
    s3: ObjectStore, tmp_path: Path
) -> None:
    storage = obstore_storage(s3, tmp_path)
    storage.create("d", "a", (b"first",))
    with pytest.raises(FileExistsError):
        storage.create("d", "a", (b"second",))


def test_a_survey_says_what_is_there(s3: ObjectStore) -> None:
    url, credentials = s3.place(), str(s3.credentials)
    assert main(url, credentials) == Survey(verdict="good")
    store = CheckpointStore(url, credentials_file=credentials)
    commit(store, 9, generation=4)
    newest = commit(store, 3, generation=5)
    fs, path = fsspec.core.url_to_fs(url, **s3.options())
    leftover = f"iteration-0000000001-generation-000007-{'0' * 16}/state.safetensors"
    fs.pipe_file(f"{path}/{leftover}", b"half")
    assert main(url, credentials) == Survey(
        verdict="good", holds=newest.path, jobs=("walk",), generation=7
    )
    assert not [name for name in s3.files(url) if "probe" in name]


@pytest.mark.slow
def test_a_survey_is_printed_by_a_process_without_torch(s3: ObjectStore) -> None:
    code = "import sys, runpy; sys.argv = ['place', *sys.argv[1:]]; " + (
        "runpy.run_module('rallypoint.checkpointing.place', run_name='__main__'); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, s3.place(), str(s3.credentials)],
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "good"


@pytest.mark.parametrize("kind", ["s3", "gs", "az"])
def test_a_bucket_that_is_not_there_is_refused(request: pytest.FixtureRequest, kind: str) -> None:
    store: ObjectStore = request.getfixturevalue(kind)
    found = main(f"{kind}://no-{uuid.uuid4().hex}/x", str(store.credentials))
    assert found.verdict == "refused", found.words
    assert "bucket" in found.words


def test_keys_that_azure_does_not_take_are_refused(az: ObjectStore, tmp_path: Path) -> None:
    file = tmp_path / "az.json"
    text = az.options()["connection_string"]
    file.write_text(json.dumps({"connection_string": text.replace("=emulator;", "=nobody;")}))
    found = main(az.place(), str(file))
    assert found.verdict == "refused", found.words
    assert az.options()["connection_string"].partition("AccountKey=")[2][:20] not in found.words


def test_a_store_that_does_not_answer_is_unreachable(tmp_path: Path) -> None:
    file = tmp_path / "s3.json"
    options = {"key": "k", "secret": "very-secret", "endpoint_url": "http://127.0.0.1:9"}
    options["config_kwargs"] = {"retries": {"max_attempts": 0}}  # type: ignore[assignment]
    file.write_text(json.dumps(options))
    found = main(f"s3://{BUCKET}/x", str(file))
    assert found.verdict == "unreachable"
    assert "127.0.0.1:9" in found.words
    assert "very-secret" not in found.words


def test_a_url_that_cannot_be_used_is_refused() -> None:
    assert main("ftp://host/x").verdict == "refused"


# --- credentials ----------------------------------------------------------------------------


def test_credentials_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text('{"key": "one"}')
    credentials = Credentials(str(file))
    assert credentials.options() == {"key": "one"}
    file.write_text('{"key": "two"}')
    assert credentials.options() == {"key": "two"}


def test_a_name_is_a_systemd_credential(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "store").write_text('{"key": "one"}')
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    assert Credentials("store").options() == {"key": "one"}
    with pytest.raises(FileNotFoundError):
        Credentials("./store").options()


def test_a_file_that_is_no_json_is_said_without_what_is_in_it(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("hunter2-hunter2")
    with pytest.raises(OSError, match=r"keys: not a JSON object") as error:
        Credentials(str(file)).options()
    assert "hunter2" not in str(error.value)


def test_secrets_are_struck_out_of_messages(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(json.dumps({"key": "public", "more": {"token": "tok-123456", "n": 5}}))
    credentials = Credentials(str(file))
    credentials.options()
    assert credentials.redacted("GET /?sig=tok-123456 failed") == "GET /?sig=*** failed"
    file.write_text(json.dumps({"connection_string": "AccountName=walking;AccountKey=a2V5a2V5;"}))
    credentials.options()
    assert credentials.redacted("walking: a2V5a2V5 is wrong") == "walking: *** is wrong"


def test_a_storage_takes_up_rotated_credentials(s3: ObjectStore, tmp_path: Path) -> None:
    """A wrong endpoint stands for keys that have expired."""
    file = tmp_path / "s3.json"
    good = s3.options()
    bad = {**good, "endpoint_url": "http://127.0.0.1:9"}
    bad["config_kwargs"] = {"retries": {"max_attempts": 0}}
    file.write_text(json.dumps(bad))
    storage = FsspecStorage(s3.place(), Credentials(str(file)))
    with pytest.raises(OSError, match=r"127\.0\.0\.1:9"):
        storage.create("d", "a", (b"x",))
    file.write_text(json.dumps(good))
    storage.create("d", "a", (b"x",))
    assert s3.files(storage.root) == ["d/a"]
