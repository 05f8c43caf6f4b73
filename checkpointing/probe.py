"""Does a store do what commits rely on? Put a key twice, and look."""

import secrets
from typing import Final

from rallypoint.checkpointing.storage import Storage

_NAME: Final = "probe"


def refuses_second_create(storage: Storage) -> str:
    """ "" when the store refuses to create what exists, and keeps what was there; else what it did.

    A store that is silent about it overwrites: some fsspec backends take the condition and ignore
    it. Leaves nothing behind. Raises OSError when it cannot be written, read or cleaned."""
    directory = f"probe-{secrets.token_hex(8)}"
    storage.claim(directory)
    try:
        storage.put_if_absent(directory, _NAME, b"first")
        try:
            storage.put_if_absent(directory, _NAME, b"second")
        except FileExistsError:
            refused = True
        else:
            refused = False
        with storage.open(directory, _NAME) as file:
            content = file.read()
    finally:
        storage.remove(directory, (_NAME,))
    if content != b"first":
        return f"{storage.root}: creating a file that exists overwrote it"
    return "" if refused else f"{storage.root}: creating a file that exists is not refused"
