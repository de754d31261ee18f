"""Landing slots of the tcp lane on CUDA: page-locked, so that copies from them run beside what comes next."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.batch import groups
from shared.sections import RunConfig
from tests.support.fake_daemon import FakeDaemon, content
from tests.support.ports import free_port
from tests.support.runs import run_config
from trainer.client import LoaderClient

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SLOW_CYCLES = 200_000_000


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return run_config(tmp_path, "none-{0..1}.tar")


@pytest.fixture
def daemon(tmp_path: Path, config: RunConfig) -> Iterator[FakeDaemon]:
    with FakeDaemon(f"tcp://127.0.0.1:{free_port()}", tmp_path, config.data) as running:
        yield running


def test_a_copy_from_a_landing_slot_waits_for_nobody(daemon: FakeDaemon, config: RunConfig) -> None:
    """It is queued behind a kernel of a tenth of a second; from pageable memory the call would wait for that."""
    with LoaderClient(daemon.endpoint, lane="tcp", verify=True) as client:
        for _ in range(8):
            batch = next(client)
            assert batch.payload.is_pinned()
            landed = torch.empty_like(batch.payload, device="cuda")
            torch.cuda._sleep(SLOW_CYCLES)
            landed.copy_(batch.payload, non_blocking=True)
            assert not torch.cuda.current_stream().query()
            torch.cuda.synchronize()
            wanted = content(groups(config.data)[batch.group], batch.spec, batch.cursor)
            assert np.array_equal(landed.cpu().numpy(), wanted)
