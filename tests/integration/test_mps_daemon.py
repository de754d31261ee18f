"""A daemon that starts MPS leaves none behind, also when it cannot serve."""

from pathlib import Path

import pytest

from dataloader_svc.mps import Control
from shared.cuda import count_gpus
from tests.support import mps_stand_in
from tests.support.daemons import Daemon, make_run


@pytest.mark.skipif(count_gpus() > 0, reason="there is a GPU: tests/gpu has the real MPS")
def test_a_daemon_refused_for_want_of_a_gpu_stops_the_mps_it_started(tmp_path: Path) -> None:
    path, _ = make_run(tmp_path)
    pipe_dir = tmp_path / "pipe"
    around = {"PATH": mps_stand_in.install(tmp_path / "bin"), "CUDA_MPS_PIPE_DIRECTORY": str(pipe_dir)}
    daemon = Daemon(path, "--set=loader.device=gpu", "--set=loader.mps=start", **around)
    assert daemon.process.wait(60) == 2
    assert f"a trainer joins with: export CUDA_MPS_PIPE_DIRECTORY={pipe_dir}" in daemon.log
    assert "MPS control daemon stopped" in daemon.log
    assert "loader.device (gpu) needs an NVIDIA driver" in daemon.log
    assert Control(pipe_dir)._processes() == []
