"""A client's cursor is a place in certain shards, which it tells from others by what WELCOME says of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import ProtocolError
from tests.support.fake_daemon import FakeDaemon
from tests.support.runs import run_config
from trainer.client import LoaderClient


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    data = run_config(tmp_path, "none.tar").data
    with FakeDaemon(f"ipc://{tmp_path}/loader.sock", tmp_path, data) as daemon:
        yield daemon


def test_shards_that_changed_between_two_sessions_are_refused(daemon: FakeDaemon) -> None:
    daemon.content = "one"
    with LoaderClient(daemon.endpoint) as client:
        client.connect()
        assert client.content == "one"
    daemon.content = "two"
    words = r"other shards \(content two\) than those read so far \(one\)"
    with LoaderClient(daemon.endpoint, content="one") as client, pytest.raises(ProtocolError, match=words):
        client.connect()


@pytest.mark.parametrize(("before", "now"), [("", "one"), ("one", "one"), ("one", "")])
def test_shards_that_nobody_told_of_or_that_are_the_same_are_read(daemon: FakeDaemon, before: str, now: str) -> None:
    daemon.content = now
    with LoaderClient(daemon.endpoint, content=before) as client:
        client.connect()
        assert client.content == (before or now)
