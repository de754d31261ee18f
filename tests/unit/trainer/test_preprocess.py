"""Laws of preprocessing on a CPU, over batches that a client really received."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from shared.batch import groups
from shared.errors import ConfigError
from shared.sections import RunConfig
from tests.support import whisper
from tests.support.fake_daemon import FakeDaemon
from tests.support.runs import run_config
from trainer.audio_frontend import import_torchaudio, mel_filters_fm
from trainer.client import LoaderClient
from trainer.features import CLIP_MEAN, CLIP_STD, LogMel, Patches
from trainer.preprocess import DeviceBatch, Preprocessor


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return run_config(tmp_path_factory.mktemp("run"), "none-{0..1}.tar")


@pytest.fixture
def client(tmp_path: Path, config: RunConfig) -> Iterator[LoaderClient]:
    endpoint = f"ipc://{tmp_path}/loader.sock"
    with FakeDaemon(endpoint, tmp_path, config.data, slots=6), LoaderClient(endpoint) as client:
        yield client


@pytest.fixture(scope="module")
def ours() -> LogMel:
    return LogMel(mel_filters_fm(whisper.N_FFT, whisper.MELS, whisper.RATE_HZ), whisper.N_FFT, whisper.HOP)


def test_mel_filters_are_whispers():
    ours = mel_filters_fm(whisper.N_FFT, whisper.MELS, whisper.RATE_HZ)
    assert np.allclose(ours.T.numpy(), whisper.filters(), atol=1e-7)


def test_log_mel_is_whispers_clip_by_clip(ours: LogMel):
    rng = np.random.default_rng(0)
    t = np.arange(32_000) / 16_000
    clips = np.stack(
        [
            rng.normal(0, 3000, 32_000),
            20_000 * np.sin(2 * np.pi * (200 + 1500 * t) * t),
            np.where(t < 0.7, 300 * np.sin(2 * np.pi * 440 * t), 0),
        ]
    ).astype(np.int16)
    found = ours(torch.from_numpy(clips))
    assert found.shape == (3, 80, 200)
    for clip, mel in zip(clips, found, strict=True):
        assert np.allclose(mel.numpy(), whisper.log_mel(clip), atol=1e-4)


def test_silence_gives_finite_features(ours: LogMel):
    found = ours(torch.zeros(2, 48_000, dtype=torch.int16))
    assert torch.equal(found, torch.full((2, 80, 300), -1.5))


def test_no_clips_give_no_mels(ours: LogMel):
    assert ours(torch.zeros(0, 48_000, dtype=torch.int16)).shape == (0, 80, 300)
    assert ours(torch.zeros(0, 0, dtype=torch.int16)).shape == (0, 80, 0)


def test_patches_run_over_row_column_channel():
    pixels = torch.randint(0, 256, (2, 32, 48, 3), dtype=torch.uint8)
    found = Patches(16, torch.device("cpu"))(pixels)
    assert found.shape == (2, 2, 3, 768)
    colour = (pixels[1, 16 + 5, 32 + 7].float() / 255 - torch.tensor(CLIP_MEAN)) / torch.tensor(CLIP_STD)
    assert torch.equal(found[1, 1, 2].reshape(16, 16, 3)[5, 7], colour)


def test_a_token_without_an_embedding_is_an_error_of_the_run_file(client: LoaderClient, config: RunConfig):
    batch = next(client)
    largest = int(batch.fields["tokens_T"].max())
    for vocab, fits in ((largest, False), (largest + 1, True)):
        decoder = msgspec.structs.replace(config.model.decoder, vocab=vocab)
        preprocess = Preprocessor(config.data, msgspec.structs.replace(config.model, decoder=decoder), "cpu")
        if fits:
            assert int(preprocess(batch).tensors.tokens_T.max()) == largest
        else:
            with pytest.raises(ConfigError, match=rf"model.decoder.vocab \({vocab}\) has no place for token {largest}"):
                preprocess(batch)


def test_every_group_has_the_shapes_of_its_layout(client: LoaderClient, config: RunConfig):
    preprocess = Preprocessor(config.data, config.model, "cpu")
    seen = set()
    for _ in range(2 * len(groups(config.data))):
        batch = next(client)
        group, lengths = groups(config.data)[batch.group], batch.fields["clip_lengths_M"].clone()
        device = preprocess(batch)
        height, width = (group.bucket.height, group.bucket.width) if group.bucket else (0, 0)
        assert device.grid_hw == (height // 16, width // 16)
        assert device.tensors.patches_NhwP.shape == (group.images, *device.grid_hw, 768)
        assert device.tensors.mels_MmF.shape == (group.clips, 80, group.clip_samples // 160)
        assert device.tensors.mel_lengths_M.tolist() == [-(-n // 160) for n in lengths.tolist()]
        assert device.tensors.tokens_T.dtype == device.tensors.features_T.dtype == torch.int64
        assert all(t.isfinite().all() for t in device.tensors)
        seen.add(group.id)
    assert len(seen) == len(groups(config.data))


def test_nothing_aliases_the_slot(client: LoaderClient, config: RunConfig):
    preprocess = Preprocessor(config.data, config.model, "cpu")
    batch = next(client)
    device = preprocess(batch)
    before = [tensor.clone() for tensor in device.tensors]
    assert batch.released
    batch.payload.fill_(0xFF)
    assert all(torch.equal(a, b) for a, b in zip(before, device.tensors, strict=True))
    memory = batch.attachment.segment.array
    start, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    assert not any(start <= t.data_ptr() < end for t in device.tensors if t.numel())


def test_prefetch_yields_what_calls_yield_and_ends(tmp_path: Path, config: RunConfig):
    endpoint = f"ipc://{tmp_path}/loader.sock"
    preprocess = Preprocessor(config.data, config.model, "cpu")
    with FakeDaemon(endpoint, tmp_path, config.data):
        with LoaderClient(endpoint, steps=4) as client:
            called = [preprocess(batch) for batch in client]
        with LoaderClient(endpoint, steps=4) as client:
            fetched = list(preprocess.prefetch(client))
    assert [batch.cursor for batch in fetched] == [batch.cursor for batch in called]
    assert len(fetched) == 8
    for one, other in zip(called, fetched, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))


def test_prefetch_does_not_wait_while_it_has_a_batch(tmp_path: Path, config: RunConfig):
    endpoint = f"ipc://{tmp_path}/loader.sock"
    with FakeDaemon(endpoint, tmp_path, config.data) as daemon, LoaderClient(endpoint, wait_s=30) as client:
        daemon.batches_left = 1
        batches = Preprocessor(config.data, config.model, "cpu").prefetch(client)
        first: DeviceBatch = next(batches)
        daemon.batches_left = 1
        assert next(batches).cursor == first.after


def test_bf16_is_for_floats_alone(client: LoaderClient, config: RunConfig):
    tensors = Preprocessor(config.data, config.model, "cpu", torch.bfloat16)(next(client)).tensors
    assert tensors.patches_NhwP.dtype == tensors.mels_MmF.dtype == torch.bfloat16
    assert tensors.labels_T.dtype == torch.int64


def test_torchaudio_resamples_without_its_extension():
    resample = import_torchaudio().functional.resample
    assert resample(torch.ones(800), 8_000, 16_000).shape == (1_600,)
    assert import_torchaudio() is import_torchaudio()


def test_the_client_needs_neither_deepspeed_nor_torchaudio():
    code = "import sys, trainer.client; print({m.split('.')[0] for m in sys.modules} & {'deepspeed', 'torchaudio'})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
