"""Addresses of daemons: `ipc://PATH`, or `tcp://HOST:PORT` with an IPv6 host in brackets. Nothing is looked up.

>>> host_port("tcp://[::1]:9200")
('::1', 9200)
"""

import ipaddress


def host_port(address: str) -> tuple[str, int] | None:
    """Host (without brackets) and port of a TCP address; None where it is none."""
    place = address.removeprefix("tcp://")
    host, _, port = place.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    malformed = not bare or set(bare) & set("[]") or (":" in bare) != bracketed or not port.isdecimal()
    return None if place == address or malformed else (bare, int(port))


def is_loopback(host: str) -> bool:
    """Whether only processes of the same host can reach `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local(address: str) -> bool:
    """Whether the address means another daemon on every host."""
    place = host_port(address)
    return address.startswith("ipc://") or bool(place and is_loopback(place[0]))
