"""Messages survive the wire; junk does not."""

import os
import subprocess
import sys

import msgspec
import pytest

from shared import wire
from shared.batch import Cursor
from shared.errors import ProtocolError

PROCESS = wire.this_process()
HELLO = wire.Hello(wire.PROTOCOL, "job", "d", 0, 1, 0, 1, Cursor(1, 2, 3), PROCESS)
BATCH = wire.Batch(Cursor(), Cursor(0, 0, 1), "e0-s0-p0-0", 1, 2, 3, 4, (1, 1, 0, 9, 5), 20, (1, 2), 0)


@pytest.mark.parametrize(
    "message", [HELLO, wire.Credit(2), wire.Release(Cursor(0, 1, 2)), wire.Heartbeat(), wire.Bye()]
)
def test_a_readers_message_survives(message: wire.Message) -> None:
    assert wire.decode_to_daemon(wire.encode(message)) == message


@pytest.mark.parametrize("message", [BATCH, wire.Heartbeat(), wire.Failure("a", "b", True), wire.Drain("stop")])
def test_a_daemons_message_survives(message: wire.Message) -> None:
    assert wire.decode_to_reader(wire.encode(message)) == message


@pytest.mark.parametrize(
    "junk", [b"", b"junk", b"\x80\x04\x95", b"\x81\xa4type\xa5Hello", msgspec.msgpack.encode({"type": "Nope"})]
)
def test_junk_is_a_protocol_error_and_nothing_else(junk: bytes) -> None:
    for decode in (wire.decode_to_daemon, wire.decode_to_reader):
        with pytest.raises(ProtocolError, match="is not a message"):
            decode(junk)


def test_an_oversized_frame_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        wire.decode_to_daemon(bytes(wire.MAX_MESSAGE_BYTES + 1))


def test_a_batch_header_stays_under_a_kilobyte() -> None:
    big = msgspec.structs.replace(BATCH, sample_ids=tuple(range(10**9, 10**9 + 64)), checksum=2**63 - 1)
    assert len(wire.encode(big)) < 1024


def test_a_process_is_known_by_its_start_and_gone_when_dead() -> None:
    assert wire.start_ticks(os.getpid()) == PROCESS.started > 0
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(60)
    assert wire.start_ticks(child.pid) == -1
