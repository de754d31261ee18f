"""Batches over TCP from real daemons: the same bytes, keys that hold, slots that are not given away too early."""

import contextlib
import itertools
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dataloader_svc.server import make_keys as new_pair
from shared.errors import ProtocolError
from shared.keys import write_pair
from shared.wire import Bye, Failure
from tests.support.daemons import ROOT, Daemon, make_run, serving, wait_until
from tests.support.keys import make_keys
from tests.support.ports import free_port, has_ipv6
from tests.support.reader import RawReader, left_behind
from tests.support.site import Site
from trainer.client import LoaderClient

pytestmark = pytest.mark.slow

LARGE = {
    "image": {"pixel_budget": 512 * 512, "patch": 16},
    "batch": {"tokens": 4096, "micro_batches": 2, "round": 2},
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A daemon on a path and, with keys, on a port."""
    folder = tmp_path_factory.mktemp("site")
    make_keys(folder / "keys")
    loader = {"metrics_port": free_port(), "listen": f"tcp://127.0.0.1:{free_port()}", "keys_dir": "keys"}
    path, config = make_run(folder, loader=loader)
    with serving(path) as daemon:
        yield Site(path, config, daemon)


READS_LITTLE = """
import sys, time
from shared.config import load
from shared.wire import Heartbeat
from tests.support.reader import RawReader, left_behind
reader = RawReader(load(sys.argv[1]), address=sys.argv[2], lane="tcp", slow=True)
reader.join(credits=9)
print("here", flush=True)
while True:
    time.sleep(0.2)
    reader.send(Heartbeat())
"""


@contextlib.contextmanager
def lazy_reader(path: Path, address: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that asks for more than there is, takes in little of it, and lives."""
    command = [sys.executable, "-c", READS_LITTLE, str(path), address]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "here\n"
            yield process
        finally:
            process.kill()


def client_of(site: Site, address: str, lane: str, keys: str | None = None) -> LoaderClient:
    loader, data = site.config.loader, site.config.data
    keys_dir = loader.keys_dir if keys is None else keys
    options = {"job": site.config.job, "data": data, "wait_s": 60, "verify": True, "lane": lane, "keys_dir": keys_dir}
    return LoaderClient(address, **options)  # type: ignore[arg-type]


def see(client: LoaderClient, count: int) -> list[tuple[object, ...]]:
    return [(b.cursor, b.batch_id, b.checksum, b.payload.numpy().tobytes()) for b in itertools.islice(client, count)]


def test_both_lanes_carry_the_same_bits(site: Site) -> None:
    with client_of(site, site.config.loader.endpoint, "slots") as client:
        slots = see(client, 24)
    before = site.metric("loader_payload_bytes_total")
    with client_of(site, site.config.loader.listen, "tcp") as client:
        frames = see(client, 24)
    assert frames == slots
    carried = sum(len(payload) for *_, payload in slots)  # type: ignore[misc]
    wait_until(lambda: site.metric("loader_payload_bytes_total") - before >= carried, "they are counted")
    wait_until(lambda: site.metric("loader_job_slots") == 0, "every slot is free again")


def test_a_lane_can_be_changed_at_any_cursor(site: Site) -> None:
    with client_of(site, site.config.loader.endpoint, "slots") as client:
        whole = see(client, 12)
    with client_of(site, site.config.loader.listen, "tcp") as client:
        first, cursor = see(client, 7), client.position
    with LoaderClient(site.config.loader.endpoint, cursor=cursor, verify=True) as client:
        assert first + see(client, 5) == whole


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("unknown reader", "does not know this reader's key"),
        ("other daemon", "it has another key than our daemon.public"),
        ("none", "it asks for keys"),
    ],
)
def test_a_wrong_key_is_refused_in_words(site: Site, tmp_path: Path, kind: str, text: str) -> None:
    keys = tmp_path / "keys"
    shutil.copytree(site.config.loader.keys_dir, keys)
    (keys / "reader.secret").unlink()
    (keys / "reader.public").unlink()
    if kind == "unknown reader":
        write_pair(keys, "reader", *new_pair())
    else:
        shutil.rmtree(keys)
        make_keys(keys)
    before = site.metric("loader_messages_rejected_total")
    mine = "" if kind == "none" else str(keys)
    with client_of(site, site.config.loader.listen, "tcp", mine) as client, pytest.raises(ProtocolError, match=text):
        next(client)
    wait_until(lambda: site.metric("loader_messages_rejected_total") > before, "the refusal is counted")
    reason = "key" if kind == "unknown reader" else "handshake"
    assert site.metric("loader_messages_rejected_total", reason=reason) > 0


def test_a_daemon_without_keys_is_found_out(tmp_path: Path, site: Site) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    path, _ = make_run(tmp_path, loader={"listen": address})
    with (
        serving(path),
        client_of(site, address, "tcp") as client,
        pytest.raises(ProtocolError, match=r"than our daemon\.public, or none"),
    ):
        next(client)


def test_an_open_address_without_keys_is_refused_unless_named(tmp_path: Path) -> None:
    address = f"tcp://0.0.0.0:{free_port()}"
    path, config = make_run(tmp_path, 16, 1, loader={"listen": address})
    refused = Daemon(path)
    assert refused.process.wait(90) == 2
    assert f"loader.endpoint ({address}) is open to the network, which needs keys" in refused.log
    local = address.replace("0.0.0.0", "127.0.0.1")
    with serving(path, "--set", "loader.allow_plain_tcp=true"), RawReader(config, address=local, lane="tcp") as reader:
        reader.join()
        assert len(reader.read(3)) == 3


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback")
def test_an_ipv6_address_is_served_like_any_other(tmp_path: Path) -> None:
    port = free_port()
    path, _ = make_run(tmp_path, 16, 1, loader={"listen": f"tcp://[::1]:{port}"})
    with serving(path), LoaderClient(f"tcp://[::1]:{port}", lane="tcp", verify=True, wait_s=30) as client:
        assert [next(client).cursor.step for _ in range(3)]
    refused = Daemon(path, "--set", f"loader.listen=tcp://[::]:{port}")
    assert refused.process.wait(90) == 2
    assert f"loader.endpoint (tcp://[::]:{port}) is open to the network, which needs keys" in refused.log


def test_a_slot_is_not_used_again_while_a_slow_reader_is_sent_it(tmp_path: Path) -> None:
    """The slow reader leaves unread what it was sent; another reads until every free slot was overwritten."""
    address, port = f"tcp://127.0.0.1:{free_port()}", free_port()
    loader = {"listen": address, "metrics_port": port, "slots_per_stream": 6, "max_streams": 1}
    path, config = make_run(tmp_path, loader=loader, data=LARGE)
    with serving(path) as daemon, RawReader(config, address=address, lane="tcp", slow=True) as slow:
        watched = Site(path, config, daemon)
        slow.join(credits=5)
        wait_until(lambda: watched.metric("loader_batches_sent_total") == 5, "its frames are on their way")
        slow.send(Bye())
        wait_until(lambda: watched.metric("loader_clients") == 0, "it has left")
        wait_until(lambda: watched.metric("loader_job_slots") > 0, "slots are still being sent")
        with RawReader(config) as quick:
            quick.join()
            quick.read(18)
            quick.bye()
        for _ in range(5):
            assert slow.arrays(slow.batch())
        wait_until(lambda: watched.metric("loader_job_slots") == 0, "its slots are free once it has them")


def test_a_frozen_reader_gives_its_slots_back_when_its_lease_ends(tmp_path: Path) -> None:
    """It says nothing and acknowledges nothing any more, with every slot on its way to it."""
    address, port = f"tcp://127.0.0.1:{free_port()}", free_port()
    loader = {"listen": address, "metrics_port": port, "slots_per_stream": 4, "max_streams": 1, "lease_s": 6}
    path, config = make_run(tmp_path, loader=loader, data=LARGE)
    with serving(path) as daemon, lazy_reader(path, address) as reader:
        watched = Site(path, config, daemon)
        wait_until(lambda: watched.metric("loader_batches_sent_total") == 4, "every slot is on its way")
        reader.send_signal(signal.SIGSTOP)
        wait_until(lambda: watched.metric("loader_clients") == 0, "its session ends")
        wait_until(lambda: watched.metric("loader_job_slots") == 0, "what it was sent is given up")
        with RawReader(config) as other:
            other.join(credits=4)
            assert len({other.batch().slot for _ in range(4)}) == 4
            other.bye()


def test_a_frozen_reader_does_not_keep_a_daemon_that_is_told_to_stop(tmp_path: Path) -> None:
    """Its frames can never be sent; nothing is lost by that, for it comes back with its cursor."""
    address, port = f"tcp://127.0.0.1:{free_port()}", free_port()
    loader = {"listen": address, "metrics_port": port, "slots_per_stream": 4, "max_streams": 1}
    path, config = make_run(tmp_path, loader=loader, data=LARGE)
    with serving(path) as daemon, lazy_reader(path, address) as reader:
        watched = Site(path, config, daemon)
        wait_until(lambda: watched.metric("loader_batches_sent_total") == 4, "every slot is on its way")
        reader.send_signal(signal.SIGSTOP)
        assert daemon.terminate() == 0
        assert "stopped with 4 leases out" in daemon.log
    assert left_behind(tmp_path / "shm") == []


def test_a_job_that_is_stuck_or_greedy_starves_no_other(tmp_path: Path) -> None:
    replace = msgspec.structs.replace
    loader = {"metrics_port": free_port(), "max_streams": 1, "slots_per_stream": 3}
    jobs = {"jobs": [{"name": "other", "seed": 7}]}
    path, config = make_run(tmp_path, loader={**loader, **jobs})
    other = replace(config, job="other", data=replace(config.data, seed=7))
    only_other = ("--set", "job=other", "--set", "data.seed=7", "--set", "loader.jobs=[]")
    with serving(path, *only_other), RawReader(other) as reader:
        reader.join()
        alone = [(b.batch_id, b.checksum) for b in reader.read(24)]
    with (
        serving(path) as daemon,
        RawReader(config) as stuck,
        RawReader(config, 1, 2) as greedy,
        RawReader(other) as good,
    ):
        site = Site(path, config, daemon)
        stuck.join(credits=1000)
        held = [stuck.batch() for _ in range(3)]
        greedy.send(greedy.hello())
        refused = greedy.expect(Failure)
        assert (refused.code, "streams of job test" in refused.text) == ("no_slots", True)
        good.join()
        assert [(b.batch_id, b.checksum) for b in good.read(24)] == alone
        wait_until(lambda: site.metric("loader_job_slots", job="test") == 3, "the stuck job holds its own slots")
        good.bye()
        with RawReader(other) as again:
            again.join(held[1].cursor)
            assert again.batch().batch_id == alone[1][0]
        assert [b.batch_id for b in held] != [name for name, _ in alone[:3]]
        stuck.release(held[0])
        assert stuck.batch().cursor == held[-1].after
