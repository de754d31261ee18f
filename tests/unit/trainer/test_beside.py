"""Readers belong together when they may come to one daemon, and only then."""

import pytest

from shared.addresses import host_port, is_local
from trainer.beside import beside

LISTS = {
    "one daemon for all": ([{1}, {1}, {1}], [[0, 1, 2]] * 3),
    "a daemon on each node": ([{1}, {2}, {1}], [[0, 2], [1], [0, 2]]),
    "one in common": ([{1, 9}, {2, 9}], [[0, 1]] * 2),
    "in common through others": ([{1, 2}, {3, 4}, {2, 3}], [[0, 1, 2]] * 3),
    "alone": ([{5}], [[0]]),
}


@pytest.mark.parametrize("case", LISTS)
def test_who_shares_an_address_belongs_together(case: str) -> None:
    addresses, expected = LISTS[case]
    assert [beside(place, addresses) for place in range(len(addresses))] == expected


@pytest.mark.parametrize(
    ("address", "place", "local"),
    [
        ("ipc:///tmp/x.sock", None, True),
        ("ipc://@x", None, True),
        ("tcp://127.0.0.1:9200", ("127.0.0.1", 9200), True),
        ("tcp://127.8.9.1:1", ("127.8.9.1", 1), True),
        ("tcp://localhost:9200", ("localhost", 9200), True),
        ("tcp://[::1]:9200", ("::1", 9200), True),
        ("tcp://[::]:9200", ("::", 9200), False),
        ("tcp://0.0.0.0:9200", ("0.0.0.0", 9200), False),
        ("tcp://node7:9200", ("node7", 9200), False),
        ("tcp://[fe80::1%eth0]:9200", ("fe80::1%eth0", 9200), False),
        ("tcp://::1:9200", None, False),
        ("tcp://[::1]", None, False),
        ("tcp://node7", None, False),
        ("tcp://:9200", None, False),
        ("tcp://node7:http", None, False),
        ("tcp://[node7:9200", None, False),
    ],
)
def test_addresses_are_taken_apart(address: str, place: tuple[str, int] | None, local: bool) -> None:
    assert host_port(address) == place
    assert is_local(address) is local
