"""What was found at a checkpoint URL that the supervisor cannot read itself."""

from typing import Literal

import msgspec


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """One line of JSON, printed by ``python -m rallypoint.checkpointing.place``."""

    verdict: Literal["good", "unconditional", "unreachable", "refused"]
    """``unconditional``: it can be used, but does not honour create-if-absent; ``unreachable``: it
    does not answer, and may later; ``refused``: it cannot be used as it is configured."""
    words: str = ""
    """Why, when it is not good."""
    holds: str | None = None
    """The newest committed checkpoint there."""
    jobs: tuple[str, ...] = ()
    """Whose the newest ones there are, as far as their manifests can be read."""
    generation: int = 0
    """Newest generation number in any name there."""
