"""The client against the real daemon: exactly once, bit for bit, whoever dies."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from shared.batch import Cursor
from shared.config import endpoint
from shared.errors import ProtocolError
from shared.sections import RunConfig
from tests.support.daemons import ROOT, STOP_S, Daemon, make_run, make_run_file, serving
from trainer.client import LoaderClient
from trainer.preprocess import Preprocessor

pytestmark = pytest.mark.slow

HOLDER = """
import sys, time
from trainer.client import LoaderClient
client = LoaderClient(sys.argv[1], job=sys.argv[2])
kept = [next(client).keep() for _ in range(2)]
print(kept[0].checksum, kept[1].checksum, sep="\\n", flush=True)
time.sleep(120)
"""

Seen = tuple[Cursor, int, tuple[int, ...]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunConfig]:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def mortal(run: tuple[Path, RunConfig], tmp_path: Path) -> tuple[Path, RunConfig]:
    """The same data under another address, for daemons that a test ends."""
    (tmp_path / "data").symlink_to(run[0].parent / "data")
    return make_run_file(tmp_path)


@pytest.fixture(scope="module")
def unbroken(daemon: Daemon, run: tuple[Path, RunConfig]) -> list[Seen]:
    """What a run without accidents sees in its first 24 batches."""
    with client_of(run[1]) as client:
        return see(client, 24)


@pytest.fixture(scope="module")
def daemon(run: tuple[Path, RunConfig]) -> Iterator[Daemon]:
    with serving(run[0]) as running:
        yield running


def client_of(config: RunConfig, **options: object) -> LoaderClient:
    return LoaderClient(endpoint(config), job=config.job, data=config.data, wait_s=60, verify=True, **options)  # type: ignore[arg-type]


def see(client: LoaderClient, count: int) -> list[Seen]:
    return [(batch.cursor, batch.checksum, batch.sample_ids) for batch in itertools.islice(client, count)]


def test_batches_hold_to_their_layout(daemon: Daemon, run: tuple[Path, RunConfig]):
    with client_of(run[1], steps=4) as client:
        for batch in client:
            fields = batch.fields
            assert int((fields["labels_T"] >= 0).sum()) == batch.counts.labels
            assert int((fields["segments_T"] > 0).sum()) == batch.counts.tokens
            assert len(batch.sample_ids) == batch.counts.samples
            assert int((fields["clip_lengths_M"] > 0).sum()) == batch.counts.clips
        assert client.position == Cursor(0, 4, 0)


def test_a_client_resumes_bit_for_bit(daemon: Daemon, run: tuple[Path, RunConfig], unbroken: list[Seen]):
    with client_of(run[1]) as client:
        first = see(client, 7)
        cursor = client.position
    with client_of(run[1], cursor=cursor) as client:
        assert first + see(client, 9) == unbroken[:16]


def test_a_killed_client_resumes_bit_for_bit(daemon: Daemon, run: tuple[Path, RunConfig], unbroken: list[Seen]):
    """It dies by SIGKILL with leased slots; whoever takes its place gets them again once the daemon has noticed."""
    command = [sys.executable, "-c", HOLDER, endpoint(run[1]), run[1].job]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        seen = [int(holder.stdout.readline()) for _ in range(2)]
        holder.kill()
    with client_of(run[1], cursor=unbroken[2][0]) as client:
        seen += [checksum for _, checksum, _ in see(client, 8)]
    assert seen == [checksum for _, checksum, _ in unbroken[:10]]


def test_a_killed_daemon_costs_no_batch_and_repeats_none(mortal: tuple[Path, RunConfig], unbroken: list[Seen]):
    path, config = mortal
    with client_of(config) as client:
        with serving(path) as first:
            seen = see(client, 5)
            held = next(client).keep()
            before = held.payload.clone()
            first.kill()
        seen += [(held.cursor, held.checksum, held.sample_ids)]
        with serving(path):
            seen += see(client, 10)
            assert torch.equal(held.payload, before)
            held.release()
            seen += see(client, 4)
        assert seen == unbroken[:20]
        assert client.reconnects == 1


def test_a_stopped_daemon_hands_over_to_its_successor(mortal: tuple[Path, RunConfig], unbroken: list[Seen]):
    path, config = mortal
    with client_of(config) as client:
        with serving(path) as first:
            seen = see(client, 5)
            first.process.terminate()
            while client.poll(0.5):
                seen += see(client, 1)
            assert first.process.wait(STOP_S) == 0
        with serving(path):
            seen += see(client, 20 - len(seen))
    assert seen == unbroken[:20]


def test_readers_of_one_stream_see_the_same_bytes(daemon: Daemon, run: tuple[Path, RunConfig], unbroken: list[Seen]):
    with client_of(run[1], reader=0, readers=2) as one, client_of(run[1], reader=1, readers=2) as other:
        one.connect()
        other.connect()
        pairs = [(see(one, 1), see(other, 1)) for _ in range(8)]
    assert all(a == b for a, b in pairs)
    assert [a[0] for a, _ in pairs] == unbroken[:8]


def test_data_ranks_share_out_the_same_batches(daemon: Daemon, run: tuple[Path, RunConfig], unbroken: list[Seen]):
    with client_of(run[1], data_rank=0, data_ranks=2) as one, client_of(run[1], data_rank=1, data_ranks=2) as other:
        ranks = [seen for _ in range(6) for client in (one, other) for seen in see(client, 1)]
    assert sorted(checksum for _, checksum, _ in ranks) == sorted(checksum for _, checksum, _ in unbroken[:12])


def test_another_data_section_is_refused_with_both_digests(daemon: Daemon, run: tuple[Path, RunConfig]):
    other = msgspec.structs.replace(run[1].data, seed=7)
    with (
        LoaderClient(endpoint(run[1]), job=run[1].job, data=other, wait_s=20) as client,
        pytest.raises(ProtocolError, match="digest"),
    ):
        next(client)


def test_preprocessing_takes_what_the_daemon_sends(daemon: Daemon, run: tuple[Path, RunConfig]):
    config = run[1]
    with client_of(config, steps=6) as client:
        for batch in Preprocessor(config.data, config.model, "cpu").prefetch(client):
            tensors = batch.tensors
            assert all(tensor.isfinite().all() for tensor in tensors)
            images = tensors.patches_NhwP.shape[0] * batch.grid_hw[0] * batch.grid_hw[1]
            clips = tensors.mels_MmF.shape[0] * (tensors.mels_MmF.shape[2] * 160 // config.data.audio.samples_per_token)
            assert int(tensors.features_T.max()) < max(1, images + clips)


def test_the_plain_pytorch_example_learns(daemon: Daemon, run: tuple[Path, RunConfig]):
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "examples/plain_pytorch.py", endpoint(run[1]), "20", run[1].job]
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    losses = [float(line.rsplit(" ", 1)[1]) for line in ran.stdout.splitlines()]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
