"""Ranks find rank 0 by any of its addresses, and only they are let in."""

import socket
import threading

import pytest

from trainer.lifeline import WORD_BYTES, accepted, joined, listening

TOKEN = 12345


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_ranks_that_meet_on_the_loopback_listen_nowhere_else(host: str) -> None:
    with listening(host) as server:
        assert server.getsockname()[0] == "127.0.0.1"


def over(peer: socket.socket) -> bool:
    """Whether the other end closed the connection, what it left unread or not."""
    try:
        return peer.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_rank_finds_rank_0_and_a_stranger_is_sent_away() -> None:
    with listening("node-a") as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
            stranger.sendall((TOKEN + 1).to_bytes(WORD_BYTES, "little") + (7).to_bytes(WORD_BYTES, "little"))
            found: dict[int, socket.socket] = {}
            waiting = threading.Thread(target=lambda: found.update(accepted(server, TOKEN, 1)))
            waiting.start()
            with joined("127.0.0.1", port, TOKEN, rank=3) as rank:
                waiting.join(30)
                assert list(found) == [3]
                assert over(stranger)
                found[3].sendall(b"x")
                assert rank.recv(1) == b"x"
            found[3].close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_a_rank_may_come_by_ipv6() -> None:
    with listening("node-a") as server, joined("::1", server.getsockname()[1], TOKEN, rank=1):
        found = accepted(server, TOKEN, 1)
        assert list(found) == [1]
        found[1].close()
