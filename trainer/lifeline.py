"""When a rank ends early, the others say which one within seconds, whatever they are waiting for, and end too.

A collective whose peer was killed fails at once over gloo, but over NVLink it waits for its timeout. So every rank
keeps a TCP connection to rank 0, which a thread of its own watches: a connection that breaks without a word is a dead
rank (a dead host shows by TCP keepalive, after KEEPALIVE_S). Rank 0 tells all others; its own death everyone sees. What
is sent, eight bytes each: at the start the run's token and the rank's number; then `BYE`, or a rank that is over, with
its exit code x 2^32, 0 where it died without one.
"""

import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.addresses import is_loopback
from shared.errors import MillstreamError
from trainer.launch import Ranks

WORD_BYTES = 8
RANK_BITS = 32
BYE = (1 << 63) - 1
JOIN_S = 60.0
GRACE_S = 5.0
OWN_ERROR_S = 2.0
KEEPALIVE_S = 30
UNEXPECTED = 5


@contextmanager
def lifeline(ranks: Ranks, exit_code: Callable[[MillstreamError], int]) -> Iterator[None]:
    """End this process, with one line that names the rank, when another one ends before all have left the block.

    A collective. After an expected error the others end with its exit code, unless they meet one of their own within
    OWN_ERROR_S. An unexpected one waits GRACE_S for news of a dead peer, which may be what caused it.

    Raises:
        MillstreamError: the ranks could not be connected within JOIN_S.
    """
    if ranks.mesh.world == 1:
        yield
        return
    line = _connected(ranks)
    try:
        yield
    except MillstreamError as error:
        line.tell(ranks.rank, exit_code(error))
        raise
    except Exception:
        time.sleep(GRACE_S)
        raise
    ranks.barrier()
    line.leave()


class Lifeline:
    """One rank's connections by rank number: rank 0's to all others, the others' to rank 0."""

    def __init__(self, rank: int, peers: dict[int, socket.socket]) -> None:
        self._rank, self._peers, self._left = rank, peers, False
        self._watcher = threading.Thread(target=self._watch, name="lifeline", daemon=True)

    def start(self) -> "Lifeline":
        """Watch from now on."""
        self._watcher.start()
        return self

    def leave(self) -> None:
        """Say goodbye: what happens to peers from here on is no business of this rank."""
        self._left = True
        for peer in self._peers.values():
            _send(peer, BYE)
        self._watcher.join(GRACE_S)
        for peer in self._peers.values():
            peer.close()

    def tell(self, rank: int, code: int) -> None:
        """Let the others know that `rank` is over."""
        for number, peer in self._peers.items():
            if number != rank:
                _send(peer, rank | code << RANK_BITS)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    word = _word(self._peers[key.data])
                    if word == BYE or self._left:
                        selector.unregister(key.fileobj)
                    else:
                        self._end(key.data if word is None else word)

    def _end(self, news: int) -> None:
        """Tell the others, then the user, and end: the main thread may hang in a collective for good."""
        rank, code = news & ((1 << RANK_BITS) - 1), news >> RANK_BITS
        self.tell(rank, code)
        if code:
            time.sleep(OWN_ERROR_S)
        why = f"ended with an error (exit code {code})" if code else "is gone: its process or its host died"
        sys.stderr.write(
            f"millstream-trainer rank {self._rank}: rank {rank} {why}; see what it said last, then continue from the "
            f"newest checkpoint with --resume\n"
        )
        sys.stderr.flush()
        os._exit(code or UNEXPECTED)


def _connected(ranks: Ranks) -> Lifeline:
    """This rank's lifeline; where rank 0 listens and the run's token go over the process group."""
    host = os.environ["MASTER_ADDR"]
    token = ranks.from_main(secrets.randbits(62))
    if not ranks.is_main:
        port = ranks.from_main(0)
        return Lifeline(ranks.rank, {0: joined(host, port, token, ranks.rank)}).start()
    with listening(host) as server:
        ranks.from_main(server.getsockname()[1])
        return Lifeline(0, accepted(server, token, ranks.mesh.world - 1)).start()


def listening(host: str) -> socket.socket:
    """A server on a free port: of the loopback where the ranks meet there, else of every address of this host."""
    if is_loopback(host):
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    dual = socket.has_dualstack_ipv6()
    return socket.create_server(("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual)


def joined(host: str, port: int, token: int, rank: int) -> socket.socket:
    try:
        peer = socket.create_connection((host, port), timeout=JOIN_S)
        _send(peer, token)
        _send(peer, rank)
    except OSError as error:
        raise MillstreamError(f"rank {rank} cannot reach rank 0 at {host} port {port} ({error})") from None
    return _kept(peer)


def accepted(server: socket.socket, token: int, count: int) -> dict[int, socket.socket]:
    """Connections of `count` ranks that know the token; strangers are sent away."""
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + JOIN_S
    while len(found) < count:
        server.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            peer, _ = server.accept()
        except TimeoutError:
            raise MillstreamError(f"{count - len(found)} of {count} ranks did not reach rank 0 in {JOIN_S} s") from None
        peer.settimeout(GRACE_S)
        rank = _word(peer) if _word(peer) == token else None
        if rank is None:
            peer.close()
        else:
            found[rank] = _kept(peer)
    return found


def _kept(peer: socket.socket) -> socket.socket:
    peer.settimeout(GRACE_S)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", KEEPALIVE_S // 3), ("TCP_KEEPINTVL", KEEPALIVE_S // 6), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return peer


def _send(peer: socket.socket, word: int) -> None:
    try:
        peer.sendall(word.to_bytes(WORD_BYTES, "little"))
    except OSError:
        return


def _word(peer: socket.socket) -> int | None:
    """The next word of a peer, or None: its connection is over."""
    found = b""
    while len(found) < WORD_BYTES:
        try:
            more = peer.recv(WORD_BYTES - len(found))
        except OSError:
            return None
        if not more:
            return None
        found += more
    return int.from_bytes(found, "little")
