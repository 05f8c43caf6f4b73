"""What every storage promises to the commit protocol: one suite, on each of them."""

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from rallypoint.checkpointing import objects
from rallypoint.checkpointing.objects import BLOCK_BYTES
from rallypoint.checkpointing.probe import refuses_second_create
from rallypoint.checkpointing.storage import Buffer, Storage

pytestmark = pytest.mark.timeout(300)

Open = Callable[[], Storage]
BOUND_S = 120.0


@pytest.fixture
def storage(open_place: Open) -> Storage:
    """A storage with one claimed directory, ``d``."""
    storage = open_place()
    storage.claim("d")
    return storage


@pytest.fixture(autouse=True)
def small_wholes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is larger than a block is streamed, and not only what is much larger."""
    monkeypatch.setattr(objects, "WHOLE_BYTES", BLOCK_BYTES)


def content(storage: Storage, name: str, directory: str = "d") -> bytes:
    with storage.open(directory, name) as file:
        return file.read()


def everything(storage: Storage) -> dict[str, dict[str, int]]:
    return storage.list(lambda directory: True)


def test_what_is_created_is_read_and_listed_by_anybody(open_place: Open, storage: Storage) -> None:
    storage.create("d", "a", (b"one ", memoryview(b"two")))
    storage.create("d", "b", ())
    other = open_place()
    assert content(other, "a") == b"one two"
    assert content(other, "b") == b""
    assert everything(other) == {"d": {"a": 7, "b": 0}}
    assert other.list(lambda directory: directory != "d") == {}


def test_what_others_create_and_remove_is_seen_at_once(open_place: Open, storage: Storage) -> None:
    """No listing is remembered."""
    other = open_place()
    storage.create("d", "kept", ())
    for _ in range(2):
        storage.create("d", "a", (b"x",))
        assert everything(other) == {"d": {"a": 1, "kept": 0}}
        other.remove("d", ("a",))
        assert everything(storage) == {"d": {"kept": 0}}


def test_a_file_is_read_from_any_place(storage: Storage) -> None:
    storage.create("d", "a", (b"0123456789",))
    with storage.open("d", "a") as file:
        assert file.seek(0, os.SEEK_END) == 10
        assert file.seek(3) == 3
        assert file.read(4) == b"3456"
        assert file.read(100) == b"789"
        assert file.read(1) == b""


@pytest.mark.slow
def test_a_file_of_several_blocks_comes_back_bit_for_bit(storage: Storage) -> None:
    piece = os.urandom(2**20 + 7)
    count = 2 * BLOCK_BYTES // len(piece) + 3
    storage.create("d", "a", (memoryview(piece) for _ in range(count)))
    assert everything(storage) == {"d": {"a": count * len(piece)}}
    with storage.open("d", "a") as file:
        assert all(file.read(len(piece)) == piece for _ in range(count))
        assert file.read(1) == b""


@pytest.mark.slow
def test_a_large_file_is_put_whole_on_the_stores_own_condition(
    open_place: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "WHOLE_BYTES", 2 * BLOCK_BYTES)
    storage, first = open_place(), os.urandom(BLOCK_BYTES + 7)
    storage.claim("d")
    storage.create("d", "a", (first[:5], memoryview(first)[5:]))
    with pytest.raises(FileExistsError):
        storage.put_if_absent("d", "a", os.urandom(BLOCK_BYTES + 7))
    assert content(open_place(), "a") == first


@pytest.mark.parametrize("size", [1, BLOCK_BYTES + 1])
def test_what_exists_is_never_overwritten(open_place: Open, storage: Storage, size: int) -> None:
    storage.create("d", "a", (b"first",))
    for writer in (storage, open_place()):
        with pytest.raises(FileExistsError):
            writer.create("d", "a", (b"s" * size,))
        with pytest.raises(FileExistsError):
            writer.put_if_absent("d", "a", b"second")
    assert content(storage, "a") == b"first"
    assert everything(storage) == {"d": {"a": 5}}


@pytest.mark.parametrize("size", [10, BLOCK_BYTES])
def test_nobody_sees_half_a_file(storage: Storage, size: int) -> None:
    """Its maker raises in the middle: after nothing, and after a block has been sent."""

    def parts() -> Iterator[Buffer]:
        yield b"x" * size
        assert "a" not in everything(storage).get("d", {})
        yield b"x" * size
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        storage.create("d", "a", parts())
    assert "a" not in everything(storage).get("d", {})
    storage.create("d", "a", (b"whole",))
    assert content(storage, "a") == b"whole"


def test_what_is_not_there_is_said(storage: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        storage.open("d", "a")
    with pytest.raises(FileNotFoundError):
        storage.open("nowhere", "a")
    storage.remove("d", ("a",))
    storage.remove("nowhere", ("a",))


def test_an_unused_root_is_empty(open_place: Open) -> None:
    assert everything(open_place()) == {}


def test_removal_keeps_what_is_not_named(storage: Storage) -> None:
    for name in ("a", "b", "c"):
        storage.create("d", name, (name.encode(),))
    storage.remove("d", ("a", "b"))
    assert everything(storage) == {"d": {"c": 1}}
    storage.remove("d", ("c",))
    assert everything(storage) == {}


def test_of_many_creators_of_one_file_one_wins(open_place: Open) -> None:
    open_place().claim("d")
    won: list[int] = []
    barrier = threading.Barrier(4)

    def create(number: int) -> None:
        storage = open_place()
        barrier.wait(BOUND_S)
        try:
            storage.create("d", "a", (b"%d" % number,))
        except FileExistsError:
            return
        won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert len(won) == 1
    assert content(open_place(), "a") == b"%d" % won[0]


def test_the_probe_is_content_and_leaves_nothing(open_place: Open) -> None:
    storage = open_place()
    assert refuses_second_create(storage) == ""
    assert everything(storage) == {}
