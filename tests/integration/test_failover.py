"""Several real daemons with the same data: whichever is killed, the sequence is that of one that never was."""

import itertools
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.config import endpoint
from shared.sections import RunConfig
from tests.support.daemons import Daemon, make_run, make_run_file, serving
from tests.support.keys import make_keys
from tests.support.ports import free_port
from tests.support.trainers import Trainer, consumed
from trainer.client import LoaderClient

pytestmark = pytest.mark.slow

STEPS = 12
FLAGS = (f"--set=train.steps={STEPS}", "--set=train.save_every=6")

Seen = list[tuple[object, ...]]


class House:
    """One node: a run file of its own over the common data, and its daemon while it lives."""

    def __init__(self, folder: Path, data: Path) -> None:
        folder.mkdir()
        (folder / "data").symlink_to(data)
        (folder / "keys").symlink_to(data.parent / "keys")
        listen = f"tcp://127.0.0.1:{free_port()}"
        self.path, self.config = make_run_file(folder, loader={"listen": listen, "keys_dir": "keys"})
        self.path_address, self.tcp_address = endpoint(self.config), listen


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunConfig]:
    folder = tmp_path_factory.mktemp("run")
    make_keys(folder / "keys")
    return make_run(folder, samples=96, shards=4)


@pytest.fixture(scope="module")
def alone(run: tuple[Path, RunConfig]) -> Iterator[Path]:
    """A daemon that nobody kills."""
    with serving(run[0]):
        yield run[0]


@pytest.fixture
def houses(run: tuple[Path, RunConfig], tmp_path: Path) -> list[House]:
    return [House(tmp_path / name, run[0].parent / "data") for name in "ab"]


@pytest.fixture
def daemons(houses: list[House]) -> Iterator[list[Daemon]]:
    with serving(houses[0].path) as first, serving(houses[1].path) as second:
        yield [first, second]


def client_of(house: House, addresses: list[str], **options: object) -> LoaderClient:
    loader, data = house.config.loader, house.config.data
    fixed = {"job": "test", "data": data, "wait_s": 60, "verify": True, "keys_dir": loader.keys_dir}
    return LoaderClient(addresses, **fixed, **options)  # type: ignore[arg-type]


def see(client: LoaderClient, count: int) -> Seen:
    return [(b.cursor, b.batch_id, b.checksum) for b in itertools.islice(client, count)]


@pytest.fixture(scope="module")
def unbroken(alone: Path, run: tuple[Path, RunConfig]) -> Seen:
    with LoaderClient(endpoint(run[1]), verify=True) as client:
        return see(client, 40)


def test_a_killed_daemon_is_followed_by_the_other_and_back(
    houses: list[House], daemons: list[Daemon], unbroken: Seen
) -> None:
    """From this node's slots to a remote daemon over TCP, and to the first one's successor when that dies too."""
    with client_of(houses[0], [houses[0].path_address, houses[1].tcp_address]) as client:
        seen = see(client, 9)
        daemons[0].kill()
        seen += see(client, 9)
        with serving(houses[0].path):
            daemons[1].kill()
            seen += see(client, 22)
        assert client.reconnects >= 2
    assert seen == unbroken


def test_a_frozen_daemon_is_left_for_the_other(houses: list[House], daemons: list[Daemon], unbroken: Seen) -> None:
    with client_of(houses[0], [house.tcp_address for house in houses], lane="tcp") as client:
        seen = see(client, 5)
        daemons[0].process.send_signal(signal.SIGSTOP)
        seen += see(client, 15)
        daemons[0].process.send_signal(signal.SIGCONT)
    assert seen == unbroken[:20]


def test_readers_of_one_stream_may_read_from_different_daemons(
    houses: list[House], daemons: list[Daemon], unbroken: Seen
) -> None:
    """Each daemon waits for its absent reader for a while, and then goes on without it."""
    seen: dict[int, Seen] = {}

    def read(number: int) -> None:
        with client_of(houses[number], [houses[number].path_address], reader=number, readers=2) as client:
            seen[number] = see(client, 30)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert seen[0] == seen[1] == unbroken[:30]


def test_training_over_tcp_loses_a_daemon_and_equals_training_over_slots(
    alone: Path, houses: list[House], daemons: list[Daemon], tmp_path: Path
) -> None:
    plain = Trainer(alone, tmp_path / "plain", *FLAGS).finish()
    both = f"--set=loader.endpoints=[{houses[0].tcp_address},{houses[1].tcp_address}]"
    keys = f"--set=loader.keys_dir={houses[0].config.loader.keys_dir}"
    remote = Trainer(alone, tmp_path / "remote", *FLAGS, both, keys, "--set=loader.lane=tcp")
    remote.wait_step(3)
    daemons[0].kill()
    remote.finish()
    assert "lane tcp" in remote.log and houses[1].tcp_address in remote.log
    numbers = ("step", "loss", "grad_norm", "tokens", "samples")
    assert [[x[n] for n in numbers] for x in remote.steps()] == [[x[n] for n in numbers] for x in plain.steps()]
    assert consumed(remote.run_dir) == consumed(plain.run_dir)
