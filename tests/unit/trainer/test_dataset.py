"""Laws of the dataset for frameworks, against a daemon of one thread over a real socket and a real segment."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from shared.errors import ConfigError, ProtocolError
from tests.support.fake_daemon import FakeDaemon
from tests.support.runs import run_config
from trainer.dataset import Item, LoaderDataset

STEPS, MICRO_BATCHES = 5, 2


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    data = run_config(tmp_path, "none.tar").data
    with FakeDaemon(f"ipc://{tmp_path}/loader.sock", tmp_path, data, MICRO_BATCHES) as daemon:
        yield daemon


@pytest.fixture
def endpoint(daemon: FakeDaemon) -> str:
    return daemon.endpoint


def dataset(endpoint: str, steps: int = STEPS) -> LoaderDataset:
    return LoaderDataset(endpoint, steps, wait_s=20, verify=True)


def same(one: list[Item], other: list[Item]) -> bool:
    """Whether two runs of items are equal to the last bit."""
    pairs = list(zip(one, other, strict=True))
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)


def test_items_outlive_their_slots(endpoint: str) -> None:
    """There are four slots, and ten items are kept."""
    at_once = [{name: tensor.clone() for name, tensor in item.items()} for item in dataset(endpoint)]
    kept = list(dataset(endpoint))
    assert len(kept) == STEPS * MICRO_BATCHES and same(kept, at_once)


def test_a_loaded_state_goes_on_at_the_next_item(endpoint: str) -> None:
    whole, first, second = list(dataset(endpoint)), dataset(endpoint), dataset(endpoint)
    begun = list(islice(first, 3))  # in the middle of a step
    second.load_state_dict(first.state_dict())
    assert same(begun + list(second), whole)


def test_a_state_does_not_go_on_over_other_shards(daemon: FakeDaemon, endpoint: str) -> None:
    daemon.content = "one"
    first, second = dataset(endpoint), dataset(endpoint)
    list(islice(first, 3))
    second.load_state_dict(first.state_dict())
    daemon.content = "two"
    with pytest.raises(ProtocolError, match="other shards"):
        next(iter(second))


def test_each_pass_goes_on_where_the_last_one_ended(endpoint: str) -> None:
    reading = dataset(endpoint)
    assert same(list(islice(reading, 3)) + list(reading), list(dataset(endpoint)))
    assert list(reading) == []


def test_the_length_is_that_of_the_whole_run(endpoint: str) -> None:
    reading = dataset(endpoint)
    assert len(reading) == STEPS * MICRO_BATCHES
    list(islice(reading, 3))
    assert len(reading) == STEPS * MICRO_BATCHES
    assert len(LoaderDataset(endpoint, STEPS, data_ranks=2, wait_s=20)) == STEPS * MICRO_BATCHES // 2


def test_a_torch_data_loader_passes_items_through(endpoint: str) -> None:
    assert same(list(DataLoader(dataset(endpoint), batch_size=None)), list(dataset(endpoint)))


def test_worker_processes_are_refused(endpoint: str) -> None:
    with pytest.raises(RuntimeError, match=r"ConfigError: num_workers \(1\) must be 0.*raise loader.workers"):
        next(iter(DataLoader(dataset(endpoint), batch_size=None, num_workers=1)))


@pytest.mark.parametrize("state", [{"step": "x"}, {"stepp": 1}, {"micro": 1.5}])
def test_what_is_no_state_is_refused(state: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="pass what state_dict returned"):
        LoaderDataset("ipc:///nowhere", 1).load_state_dict(state)
