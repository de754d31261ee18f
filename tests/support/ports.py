"""TCP ports nobody uses at the moment, and what addresses this host has."""

import contextlib
import random
import socket
from pathlib import Path

TRIES = 1000


def free_port() -> int:
    """One that no outgoing connection gets, of which there are many until whoever was given the port binds it."""
    outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(outgoing // 2, outgoing), TRIES):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"none of {TRIES} ports below {outgoing} is free")


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
