"""The real MPS control daemon: started, joined by another process, left to it, and stopped."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataloader_svc.mps import COMMAND, Control, sharing
from shared import mps as places
from shared.cuda import count_gpus
from shared.sections import LoaderSection
from tests.support.daemons import alive, wait_until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(count_gpus() == 0 or shutil.which(COMMAND) is None, reason=f"no CUDA device, or no {COMMAND}"),
]

CLIENT = "import torch; torch.zeros(1, device='cuda').cpu(); print('up', flush=True); input()"
START = LoaderSection(device="gpu", mps="start")


@pytest.fixture
def pipe_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Our own pipe directory under a short name: its socket's path must stay below 108 characters."""
    root = Path(tempfile.mkdtemp(prefix="mps-", dir="/tmp"))
    monkeypatch.setattr(places, "ROOT", root)
    monkeypatch.delenv(places.PIPE_VARIABLE, raising=False)
    yield places.own_dir() / "pipe"
    Control(places.own_dir() / "pipe")._end()
    shutil.rmtree(root)


def test_it_starts_serves_a_client_and_stops(pipe_dir: Path) -> None:
    with sharing(START) as environment:
        (control,) = Control(pipe_dir)._processes()
        command = [sys.executable, "-c", CLIENT]
        around = {**os.environ, **environment}
        with subprocess.Popen(command, env=around, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout and client.stdout.readline() == "up\n"
            assert client.pid in Control(pipe_dir).clients()
            client.communicate("\n", timeout=60)
        wait_until(lambda: not Control(pipe_dir).clients(), "the client has left")
    wait_until(lambda: not alive(control), "the control daemon is gone")
    assert not Control(pipe_dir).answers()


def test_one_that_was_left_behind_is_used_again(pipe_dir: Path) -> None:
    Control(pipe_dir).start()
    (left,) = Control(pipe_dir)._processes()
    with sharing(START):
        assert Control(pipe_dir)._processes() == [left]
    wait_until(lambda: not alive(left), "the control daemon is gone")
