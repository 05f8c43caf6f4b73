"""Damaged checkpoints: each is found, named, and costs nothing but itself."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rallypoint.checkpointing import manifest as manifests
from rallypoint.checkpointing import tensorfile
from rallypoint.checkpointing.errors import CheckpointError, DamagedCheckpoint
from rallypoint.checkpointing.manifest import MANIFEST_FILE, STATE_FILE
from rallypoint.checkpointing.restore import load_checkpoint
from rallypoint.checkpointing.storage import LocalStorage, ReadableFile
from rallypoint.checkpointing.store import CheckpointStore
from tests.checkpointing.samples import assert_state, commit, newest, state

HOSTILE = b"cos\nsystem\n(S'touch hacked'\ntR."  # a pickle that would run a command


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return apply


def edit_json(**changes: Any) -> Callable[[Path], None]:
    """Change the manifest, and seal it again: what a faulty or hostile writer would do."""
    return edit(
        MANIFEST_FILE,
        lambda data: manifests.seal(json.dumps(json.loads(data) | changes).encode()),
    )


def flip(position: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        at = position % len(data)
        return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def replace_by_directory(folder: Path) -> None:
    (folder / STATE_FILE).unlink()
    (folder / STATE_FILE).mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "bit flip in a tensor": (edit(STATE_FILE, flip(-1)), "state.safetensors: is sha256-"),
    "bit flip in the header": (edit(STATE_FILE, flip(12)), "state.safetensors: is sha256-"),
    "truncated": (edit(STATE_FILE, lambda d: d[:-1]), "has 199 bytes, its manifest says 200"),
    "emptied": (edit(STATE_FILE, lambda d: b""), "has 0 bytes, its manifest says 200"),
    "longer": (edit(STATE_FILE, lambda d: d + b"x"), "has 201 bytes, at most 200 expected"),
    "no data": (remove(STATE_FILE), "state.safetensors is missing"),
    "data is a directory": (replace_by_directory, "state.safetensors"),
    "manifest emptied": (edit(MANIFEST_FILE, lambda d: b""), "manifest.json: not a manifest"),
    "manifest cut": (edit(MANIFEST_FILE, lambda d: d[:-9]), "manifest.json: not a manifest"),
    "manifest is binary": (edit(MANIFEST_FILE, lambda d: os.urandom(64)), "not a manifest"),
    "manifest is a pickle": (edit(MANIFEST_FILE, lambda d: HOSTILE), "not a manifest"),
    "manifest nests deeply": (edit(MANIFEST_FILE, lambda d: b"[" * 10**6), "not a manifest"),
    "manifest has no schema": (edit(MANIFEST_FILE, lambda d: b"{}"), "not a manifest"),
    "bit flip in the manifest": (edit(MANIFEST_FILE, flip(250)), "not a manifest"),
    "a figure of the manifest changed": (
        edit(MANIFEST_FILE, lambda d: d.replace(b'"env_steps": 200', b'"env_steps": 201')),
        "not a manifest: its bytes do not have its own_checksum",
    ),
    "manifest without seal": (
        edit(MANIFEST_FILE, lambda d: d.replace(b"own_checksum", b"our_checksum")),
        "it has no own_checksum",
    ),
    "schema of the future": (edit_json(schema=2), "schema 2, but this version .* reads schema 1"),
    "other iteration": (edit_json(iteration=3), "speaks of .*3, 1,.* but the directory's name"),
    "other generation": (edit_json(generation=9), "but the directory's name says"),
    "file outside": (
        edit_json(files={"../../etc/passwd": {"size_bytes": 1, "checksum": "sha256-0"}}),
        "'../../etc/passwd' is not the name of a data file",
    ),
    "file of negative size": (
        edit_json(files={STATE_FILE: {"size_bytes": -1, "checksum": "sha256-0"}}),
        "is said to have -1 bytes",
    ),
    "huge file": (
        edit_json(files={STATE_FILE: {"size_bytes": 2**62, "checksum": "sha256-0"}}),
        f"has 200 bytes, its manifest says {2**62}",
    ),
    "unknown checksum": (
        edit_json(files={STATE_FILE: {"size_bytes": 200, "checksum": "md5-0"}}),
        "its manifest says md5-0",
    ),
    "entry without file": (
        edit_json(entries={"a": {"scope": "global", "dtype": "F32", "shape": [], "file": "b"}}),
        "'a' is said to be in 'b', which is not among the files",
    ),
    "entry too many": (
        edit_json(
            entries={"a": {"scope": "global", "dtype": "F32", "shape": [], "file": STATE_FILE}}
        ),
        r"holds 'a' as nothing, its manifest says \('F32', \(\)\) \(3 tensors differ\)",
    ),
    "no entries": (edit_json(entries={}), "its manifest says nothing"),
}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """A store with checkpoints of iterations 1 and 2."""
    store = CheckpointStore(str(tmp_path))
    for iteration in (1, 2):
        commit(store, iteration)
    return store


@pytest.mark.parametrize("damage", DAMAGES)
def test_numeric_36_damage_is_named_and_the_one_before_is_restored(
    store: CheckpointStore, damage: str, tmp_path: Path
) -> None:
    apply, message = DAMAGES[damage]
    info = store.list()[0]
    apply(Path(info.path))
    with pytest.raises(DamagedCheckpoint, match=message) as error:
        store.verify(info)
    assert info.path in str(error.value)
    loaded, skipped = store.restore_newest()
    assert loaded is not None
    assert_state(loaded, 1)
    assert skipped == loaded.skipped == (str(error.value),)
    with pytest.raises(DamagedCheckpoint, match=message):
        load_checkpoint(info.path)
    commit(store, 3)
    assert newest(store).skipped == ()
    assert not (tmp_path / "hacked").exists()


def test_a_directory_without_manifest_was_never_committed(store: CheckpointStore) -> None:
    info = store.list()[0]
    Path(info.path, MANIFEST_FILE).unlink()
    assert [info.iteration for info in store.list()] == [1]
    loaded = newest(store)
    assert_state(loaded, 1)
    assert loaded.skipped == ()
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is missing"):
        store.verify(info)
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        load_checkpoint(info.path)


def test_a_checkpoint_under_the_name_of_another_is_damaged(store: CheckpointStore) -> None:
    info = store.list()[1]
    claimed = info.path.replace("generation-000001", "generation-000009")
    Path(info.path).rename(claimed)
    loaded, skipped = store.restore_newest()
    assert loaded is not None
    assert_state(loaded, 2)
    assert len(skipped) == 1
    assert "but the directory's name says (1, 9," in skipped[0]


def test_nothing_that_verifies_is_said_with_every_reason(store: CheckpointStore) -> None:
    for info in store.list():
        edit(STATE_FILE, flip(-1))(Path(info.path))
    loaded, skipped = store.restore_newest()
    assert loaded is None
    assert len(skipped) == 2
    with pytest.raises(DamagedCheckpoint, match=r"nothing here verifies: .*0002-.*0001-"):
        load_checkpoint(store.url)


def test_a_file_that_cannot_be_read_is_skipped_too(tmp_path: Path) -> None:
    class BadSector(LocalStorage):
        def open(self, directory: str, name: str) -> ReadableFile:
            if directory.startswith("iteration-0000000002") and name == STATE_FILE:
                raise OSError(errno.EIO, "Input/output error")
            return super().open(directory, name)

    for iteration in (1, 2):
        commit(CheckpointStore(str(tmp_path)), iteration)
    store = CheckpointStore("unused", storage=BadSector(tmp_path))
    loaded = newest(store)
    assert_state(loaded, 1)
    assert "state.safetensors: [Errno 5] Input/output error" in loaded.skipped[0]
    store.prune(1)
    assert_state(newest(store), 1)


# --- fuzz ---------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def _sample_manifest() -> bytes:
    record = manifests.FileRecord(size_bytes=8, checksum="sha256-0")
    entry = manifests.EntryRecord(scope="global", dtype="F32", shape=(2,), file=STATE_FILE)
    return manifests.encode(
        manifests.Manifest(
            schema=1,
            job="j",
            job_uid="u",
            iteration=1,
            generation=1,
            env_steps=1,
            world_size=1,
            budget="global",
            config_hash="h",
            config={},
            versions={},
            attempt="0" * 16,
            entries={"a": entry},
            files={STATE_FILE: record},
        )
    )


SAMPLE = _sample_manifest()
SAMPLE_FILE = b"".join(tensorfile.stream(state()))


def _decode_or_refuse(data: bytes) -> None:
    try:
        manifests.decode(data, "here")
    except DamagedCheckpoint as error:
        refusal = str(error)
    else:
        return
    assert refusal.startswith("here: ")


def _parse_or_refuse(data: bytes) -> None:
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
    try:
        tensors = tensorfile.parse(buffer.to(torch.uint8), "here")
    except DamagedCheckpoint as error:
        refusal = str(error)
    else:
        for tensor in tensors.values():
            tensor.clone()  # every byte of it is really there
        return
    assert refusal.startswith("here: ")


@given(key=st.sampled_from(sorted(json.loads(SAMPLE))), value=JSON)
def test_fuzz_a_value_of_the_manifest(key: str, value: object) -> None:
    data = json.dumps(json.loads(SAMPLE) | {key: value}).encode()
    if key == "own_checksum":
        _decode_or_refuse(data)
    else:
        _decode_or_refuse(manifests.seal(data))


@given(at=st.integers(0, len(SAMPLE) - 1), data=st.binary(max_size=8), cut=st.integers(0, 8))
def test_fuzz_bytes_of_the_manifest(at: int, data: bytes, cut: int) -> None:
    _decode_or_refuse(SAMPLE[:at] + data + SAMPLE[at + cut :])


@given(at=st.integers(0, len(SAMPLE_FILE) - 1), data=st.binary(max_size=8), cut=st.integers(0, 8))
def test_fuzz_bytes_of_the_tensors(at: int, data: bytes, cut: int) -> None:
    _parse_or_refuse(SAMPLE_FILE[:at] + data + SAMPLE_FILE[at + cut :])


@given(
    dtype=st.sampled_from([*tensorfile.DTYPE_NAMES.values(), "F8", ""]),
    shape=st.lists(st.integers(-2, 2**40), max_size=3),
    begin=st.integers(-(2**63), 2**63),
    end=st.integers(-16, 32),
    body=st.binary(max_size=24),
)
def test_fuzz_the_header_of_the_tensors(
    dtype: str, shape: list[int], begin: int, end: int, body: bytes
) -> None:
    header = json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}})
    text = header.encode()
    _parse_or_refuse(len(text).to_bytes(8, "little") + text + body)


@given(length=st.integers(0, 2**64 - 1), rest=st.binary(max_size=64))
def test_fuzz_the_length_of_the_header(length: int, rest: bytes) -> None:
    _parse_or_refuse(length.to_bytes(8, "little") + rest)


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzz_files_on_disk(store: CheckpointStore, data: st.DataObject) -> None:
    """No change of any byte goes unseen."""
    info = commit(store, 2)
    name = data.draw(st.sampled_from([MANIFEST_FILE, STATE_FILE]))
    path = Path(info.path, name)
    original = path.read_bytes()
    at = data.draw(st.integers(0, len(original) - 1))
    changed = original[:at] + data.draw(st.binary(max_size=4)) + original[at + 1 :]
    path.write_bytes(changed)
    if changed == original:
        store.verify(info)
    else:
        with pytest.raises(DamagedCheckpoint):
            store.verify(info)
    assert_state(newest(store), 2)
