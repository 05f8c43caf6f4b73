"""Whether the addresses of this node are its own, before a worker finds out that they are not."""

import socket

from rallypoint.daemon.shared.config import NodeSection
from rallypoint.daemon.shared.errors import ConfigError


def require_addresses(section: NodeSection) -> None:
    """Raises `ConfigError` for a ``node.bind`` or ``node.interface`` that this machine does not have, and
    for a ``node.advertise`` that is no address. A name that cannot be looked up now may be known
    later, and to the other nodes: it passes."""
    _require_bind(section.bind)
    for name in section.interface.split(","):
        _require_interface(name, section.interface)
    _require_advertise(section.advertise)


def _require_bind(bind: str) -> None:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        if not bind:
            raise OSError(None, "it is empty, which would be every address")
        with socket.socket(family) as listening:
            listening.bind((bind, 0))
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"node.bind = {bind!r}: cannot listen there: {_words(error)}; give an address of this node"
        ) from error


def _require_interface(name: str, given: str) -> None:
    try:
        socket.if_nametoindex(name)
    except OSError as error:
        there = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(
            f"node.interface = {given!r}: no interface {name!r} is on this machine; there are {there}"
        ) from error


def _require_advertise(advertise: str) -> None:
    try:
        if not advertise:
            raise OSError(None, "it is empty")
        socket.getaddrinfo(advertise, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
            return
        raise ConfigError(
            f"node.advertise = {advertise!r}: not an address that can be reached: {_words(error)}; give "
            "the IPv4 or IPv6 address of this node, without a port, or a name of it"
        ) from error


def _words(error: OSError | UnicodeError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
