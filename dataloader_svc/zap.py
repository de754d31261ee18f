"""Who may come in: answers of ZAP, ZeroMQ's authentication protocol (RFC 27), as frames. No sockets here."""

from collections.abc import Sequence, Set

DOMAIN = b"millstream"
VERSION = b"1.0"


def answer(request: Sequence[bytes], allowed: Set[bytes]) -> tuple[list[bytes], str]:
    """The reply to a request, and why it says no ("" when it does not). `allowed` are binary public keys.

    The frames of a request: version, request id, domain, address, identity, mechanism, and with CURVE the client's key.
    """
    version, request_id, _, address, _, mechanism, *credentials = request
    if (version, mechanism) == (VERSION, b"CURVE") and len(credentials) == 1 and credentials[0] in allowed:
        return [VERSION, request_id, b"200", b"OK", b"", b""], ""
    why = f"a reader at {address.decode(errors='replace')} has a key that is not in loader.keys_dir"
    return [VERSION, request_id, b"400", b"unknown key", b"", b""], why
