"""The manifest of a checkpoint: what it holds, from when, and how its files verify.

A checkpoint is a directory ``iteration-NNNNNNNNNN-generation-NNNNNN-ATTEMPT`` with one safetensors
file and ``manifest.json``, which is written last. Nothing in it depends on the world size.
"""

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import msgspec

from rallypoint.checkpointing.errors import DamagedCheckpoint

SCHEMA: Final = 1
MANIFEST_FILE: Final = "manifest.json"
STATE_FILE: Final = "state.safetensors"
MAX_MANIFEST_BYTES: Final = 16 * 2**20

ScopeName = Literal["replicated", "global", "env_rows", "shard"]
SCOPES: Final[tuple[str, ...]] = get_args(ScopeName)

UNSEALED: Final = f"sha256-{'0' * 64}"
_SEAL: Final = re.compile(rb'"own_checksum": "sha256-([0-9a-f]{64})"')
_DIRECTORY: Final = re.compile(r"iteration-(\d{10,18})-generation-(\d{6,18})-([0-9a-f]{16})")


class FileRecord(msgspec.Struct, frozen=True):
    """What a file must be to be trusted."""

    size_bytes: int
    checksum: str
    """``sha256-`` and 64 hexadecimal digits."""


class EntryRecord(msgspec.Struct, frozen=True):
    """One tensor."""

    scope: ScopeName
    dtype: str
    """safetensors name of the number type: ``F32``, ``I64``, ``BOOL``, …"""
    shape: tuple[int, ...]
    file: str


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller of a save knows about the state it hands over."""

    job: str
    job_uid: str
    iteration: int
    """Newest committed iteration that the state contains."""
    generation: int
    """Generation that commits: the fence. Readers order by (generation, iteration)."""
    env_steps: int
    """Global env steps committed so far."""
    world_size: int
    """Ranks at that moment, for people; a checkpoint fits any world size."""
    budget: Literal["per_rank", "global"]
    config_hash: str
    config: dict[str, Any]
    """The resolved sections ``job``, ``env`` and ``ppo``, as JSON values."""
    versions: dict[str, str]
    metrics: dict[str, float | None] = {}
    """Some figures of that iteration; null where one was not finite."""
    warm_start: str | None = None
    """Checkpoint that gave the job its first parameters."""


class Manifest(CheckpointMeta, frozen=True, kw_only=True):
    """`CheckpointMeta`, and what was written. Unknown fields are ignored, so that a later version
    may add some without a new schema."""

    schema: int
    attempt: str
    entries: dict[str, EntryRecord]
    files: dict[str, FileRecord]
    own_checksum: str = UNSEALED
    """Of the manifest's bytes, with zeros in place of these digits. Last in the file."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint as its directory's name tells; it may still fail to verify."""

    iteration: int
    generation: int
    attempt: str
    path: str
    """Full path or URL of the directory."""
    size_bytes: int
    """Sum over the files in it (over its data files, when only the manifest was read)."""

    @property
    def order(self) -> tuple[int, int]:
        """(generation, iteration): a later generation wins whatever its iteration."""
        return self.generation, self.iteration

    @property
    def directory(self) -> str:
        """Name of the directory."""
        return self.path.rsplit("/", 1)[-1]


def new_attempt() -> str:
    """16 random hexadecimal digits: no other save, in any process, has the same."""
    return secrets.token_hex(8)


def directory_name(iteration: int, generation: int, attempt: str) -> str:
    """Name of a checkpoint's directory; names of one generation sort by iteration."""
    return f"iteration-{iteration:010d}-generation-{generation:06d}-{attempt}"


def parse_directory_name(name: str) -> tuple[int, int, str] | None:
    """(iteration, generation, attempt), or None for a name that is not a checkpoint's."""
    match = _DIRECTORY.fullmatch(name)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def encode(manifest: Manifest) -> bytes:
    """Indented JSON, so that people can read it, sealed with its own checksum."""
    return seal(msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def seal(data: bytes) -> bytes:
    """Manifest bytes with ``own_checksum`` made right."""
    begin, end = _seal_digits(data)
    return data[:begin] + _own_digits(data).encode() + data[end:]


def _seal_digits(data: bytes) -> tuple[int, int]:
    """Where the digits of ``own_checksum`` are: the last such key, since it is the last field."""
    matches = list(_SEAL.finditer(data))
    if not matches:
        raise ValueError("it has no own_checksum")
    return matches[-1].span(1)


def _own_digits(data: bytes) -> str:
    begin, end = _seal_digits(data)
    return hashlib.sha256(data[:begin] + b"0" * (end - begin) + data[end:]).hexdigest()


class _SchemaOnly(msgspec.Struct):
    schema: int


def decode(data: bytes, path: str) -> Manifest:
    """The manifest in ``data``. Raises `DamagedCheckpoint`, naming ``path``, for anything else."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise DamagedCheckpoint(f"{path}: over {MAX_MANIFEST_BYTES} bytes, so not a manifest")
    try:
        schema = msgspec.json.decode(data, type=_SchemaOnly).schema
        if schema != SCHEMA:
            raise DamagedCheckpoint(
                f"{path}: schema {schema}, but this version of rallypoint reads schema {SCHEMA}; "
                "use the version that wrote it"
            )
        begin, end = _seal_digits(data)
        if data[begin:end].decode() != _own_digits(data):
            raise ValueError("its bytes do not have its own_checksum")
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: not a manifest: {error}") from error
    _check(manifest, path)
    return manifest


def _check(manifest: Manifest, path: str) -> None:
    for name, record in manifest.files.items():
        # A manifest may only speak of files beside it: a path could lead anywhere.
        if "/" in name or "\\" in name or name in ("", ".", "..", MANIFEST_FILE):
            raise DamagedCheckpoint(f"{path}: {name!r} is not the name of a data file")
        if record.size_bytes < 0:
            raise DamagedCheckpoint(f"{path}: {name} is said to have {record.size_bytes} bytes")
    for name, entry in manifest.entries.items():
        if entry.file not in manifest.files:
            raise DamagedCheckpoint(
                f"{path}: {name!r} is said to be in {entry.file!r}, which is not among the files"
            )
