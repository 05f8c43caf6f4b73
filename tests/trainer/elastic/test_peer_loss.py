"""Which failures of a collective say that a peer is gone, and which are the program's own."""

import pytest

from rallypoint.trainer.elastic.group import is_peer_loss

SEEN = (
    "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.77.0.3]:1220.",
    "[gloo/transport/tcp/pair.cc:537] Read error [10.77.0.1]:62385: Connection reset by peer.",
    "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 48000ms for recv operation",
    "Application timeout caused pair closure",
)


@pytest.mark.parametrize("message", SEEN)
def test_what_gloo_says_of_a_lost_or_silent_peer_is_no_error_of_the_program(message: str) -> None:
    assert is_peer_loss(RuntimeError(message))
    assert not is_peer_loss(ValueError(message))


def test_an_error_of_the_program_is_none_of_a_peer() -> None:
    assert not is_peer_loss(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
