"""A pipeline whose first and last stage each have a daemon of their own node: real daemons, real ranks over gloo."""

from pathlib import Path

import pytest

from shared.config import endpoint
from tests.support.daemons import make_run, make_run_file, serving
from tests.support.ports import free_port
from tests.support.ranks import run_ranks

BATCHES = 14


@pytest.mark.slow
def test_each_daemon_waits_for_its_own_nodes_readers_alone(tmp_path: Path) -> None:
    """Two data ranks over two stages: every stream has a reader at each daemon, which goes on without a wait."""
    (tmp_path / "one").mkdir()
    path, config = make_run(tmp_path / "one")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "data").symlink_to(tmp_path / "one" / "data")
    other, _ = make_run_file(tmp_path / "two", loader={"endpoint": f"tcp://127.0.0.1:{free_port()}"})
    with serving(path) as first, serving(other) as second:
        addresses = [endpoint(config)] * 2 + [second.ready_file.read_text().strip()] * 2
        task = {"config": str(path), "endpoints": addresses, "mesh": {"pipe": 2, "data": 2}, "batches": BATCHES}
        seen = run_ranks("tests.support.beside_program", 4, tmp_path / "out", task)
        for daemon in (first, second):
            assert "goes on without readers" not in daemon.log
            assert daemon.log.count("joins at") == 2
    assert seen[0] == seen[2] != seen[1] == seen[3]
    assert [len(batches) for batches in seen] == [BATCHES] * 4
