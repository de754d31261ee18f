"""Laws of preprocessing on CUDA: graphs equal eager code, and no step sees another batch's bytes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shared.batch import groups
from shared.sections import RunConfig
from tests.support.fake_daemon import FakeDaemon, content
from tests.support.runs import run_config
from trainer.batches import views
from trainer.client import LoaderClient
from trainer.preprocess import GraphLane, Preprocessor, Tensors, Transform

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SLOW_CYCLES = 20_000_000


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return run_config(tmp_path_factory.mktemp("run"), "none-{0..1}.tar")


@pytest.fixture
def daemon(tmp_path: Path, config: RunConfig) -> Iterator[FakeDaemon]:
    """Its segment lies in /dev/shm: CUDA page-locks memory of a tmpfs, not of a file on a disk."""
    with FakeDaemon(f"ipc://{tmp_path}/loader.sock", Path("/dev/shm"), config.data, slots=4) as running:
        yield running


@pytest.fixture(scope="module")
def preprocess(config: RunConfig) -> Preprocessor:
    preprocess = Preprocessor(config.data, config.model, "cuda")
    preprocess.warm_up()
    return preprocess


def expected(config: RunConfig, daemon: FakeDaemon, group: int, cursor: object) -> Tensors:
    """The batch at a cursor by eager code on the CPU, from the bytes that the daemon wrote."""
    spec = daemon.specs[group]
    payload = torch.from_numpy(content(groups(config.data)[group], spec, cursor))  # type: ignore[arg-type]
    return Transform(config.data, config.model, torch.device("cpu"), torch.float32)(views(payload, spec))


def assert_close(found: Tensors, wanted: Tensors) -> None:
    for name, a, b in zip(Tensors._fields, found, wanted, strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=2e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_graphs_equal_eager_code_in_every_group(daemon: FakeDaemon, config: RunConfig, preprocess: Preprocessor):
    with LoaderClient(daemon.endpoint, verify=True) as client:
        for _ in range(2 * len(groups(config.data))):
            batch = preprocess(next(client))
            assert_close(batch.tensors, expected(config, daemon, batch.group, batch.cursor))


def test_the_segment_is_page_locked(daemon: FakeDaemon):
    with LoaderClient(daemon.endpoint) as client:
        assert next(client).payload.is_pinned()


def test_no_step_sees_the_bytes_of_another(daemon: FakeDaemon, config: RunConfig, preprocess: Preprocessor):
    """Every step first sleeps on the compute stream, then copies what it sees; free slots are poisoned."""
    free = daemon.pool.free

    def poison_and_free(slot: int) -> None:
        daemon.pool.segment.payload(slot)[:] = 0xFF
        free(slot)

    daemon.pool.free = poison_and_free  # type: ignore[method-assign]
    assert isinstance(preprocess._lane, GraphLane)
    for buffer in preprocess._lane._buffers:
        buffer.payload.fill_(0xFF)
    seen = []
    with LoaderClient(daemon.endpoint, steps=25) as client:
        for batch in preprocess.prefetch(client):
            torch.cuda._sleep(SLOW_CYCLES)
            seen.append((batch, Tensors(*(tensor.clone() for tensor in batch.tensors))))
    assert len(seen) == 50
    for batch, tensors in seen:
        assert_close(tensors, expected(config, daemon, batch.group, batch.cursor))


def test_a_batch_stays_until_the_second_next_is_asked_for(
    daemon: FakeDaemon, config: RunConfig, preprocess: Preprocessor
):
    with LoaderClient(daemon.endpoint, steps=10) as client:
        batches = preprocess.prefetch(client)
        before = next(batches)
        for batch in batches:
            torch.cuda._sleep(SLOW_CYCLES // 4)
            assert_close(before.tensors, expected(config, daemon, before.group, before.cursor))
            before = batch
