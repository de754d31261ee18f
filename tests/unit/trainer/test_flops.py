"""FLOPs are three times those that torch counts in a forward pass without padding; MFU is their share of the peak."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shared.batch import Cursor
from shared.config import load
from shared.sections import RunConfig
from tests.support.packs import pack, pick_group
from tests.support.runs import run_config
from trainer.batches import Counts
from trainer.flops import FlopCounter, Work, mfu, peak_tflops
from trainer.models import build
from trainer.models.attention import masked_attention
from trainer.models.cross import CrossAttention
from trainer.models.vision import resample
from trainer.preprocess import DeviceBatch, Tensors

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "forms": {"vision": {"class_token": True}, "decoder": {"head_dim": 20}},
    "experts": {"decoder": {"experts": 4, "experts_per_token": 3, "expert_mlp": 48, "expert_every": 2}},
}


@pytest.fixture(params=MODELS)
def config(request: pytest.FixtureRequest, tmp_path: Path) -> RunConfig:
    return run_config(tmp_path, "part-{0..0}.tar", model=MODELS[request.param])


def batch_of(config: RunConfig, image: bool, audio: bool, captions: list[int]) -> DeviceBatch:
    """A pack of one sample for each caption, every clip of full length."""
    group = pick_group(config, image, audio)
    inputs, labels = pack(config, group, captions, torch.Generator().manual_seed(0))
    tokens, *rest = inputs
    lengths = rest.pop()
    full = torch.full_like(lengths, group.clip_samples // config.model.audio.hop)
    full[len(captions) :] = 0
    tensors = Tensors(tokens, labels, *rest, full)  # type: ignore[call-arg]
    used = int(tensors.cu_seqlens[len(captions)])
    counts = Counts(len(captions), image * len(captions), audio * len(captions), used, sum(captions))
    return DeviceBatch(tensors, Cursor(), Cursor(), "b", group.id, counts, 1, (), 0, 0, 0.0, 0.0)


def counted(config: RunConfig, *batches: DeviceBatch) -> float:
    counter, work = FlopCounter(config.data, config.model), Work()
    for batch in batches:
        counter.add(work, batch)
    return counter.flops(work)


def run_by_torch(config: RunConfig, batch: DeviceBatch) -> int:
    """What torch counts of one forward pass; attention in plain matrix products, with every pair of the pack."""
    model = build.build(config, "math")
    with FlopCounterMode(display=False) as mode, torch.no_grad():
        model(batch.inputs)
    return mode.get_total_flops()


def test_a_full_pack_of_text_costs_what_torch_counts(config: RunConfig) -> None:
    decoder, length = config.model.decoder, config.data.batch.tokens
    batch = batch_of(config, False, False, [length - 1])
    assert batch.counts.tokens == length
    unseen = length * length - length * (length + 1) // 2
    hidden_pairs = 12 * decoder.depth * decoder.heads * decoder.head_size * unseen
    assert counted(config, batch) + hidden_pairs == pytest.approx(3 * run_by_torch(config, batch))


def without_media(batch: DeviceBatch) -> DeviceBatch:
    """The same tokens, of which none stands for a picture or a clip."""
    tensors = batch.tensors._replace(mel_lengths_M=torch.zeros_like(batch.tensors.mel_lengths_M))
    counts = msgspec.structs.replace(batch.counts, images=0, clips=0)
    return msgspec.structs.replace(batch, tensors=tensors, counts=counts)


@pytest.mark.parametrize(("image", "audio"), [(True, False), (False, True), (True, True)])
def test_an_encoder_costs_what_torch_counts(config: RunConfig, image: bool, audio: bool) -> None:
    batch = batch_of(config, image, audio, [1] * pick_group(config, image, audio).samples)
    encode = build.build(config, "math").get_submodule("0")
    grid = torch.empty(config.model.vision.grid, config.model.vision.grid, config.model.vision.dim)
    with FlopCounterMode(display=False) as positions, torch.no_grad():
        resample(grid, *batch.grid_hw)
    with FlopCounterMode(display=False) as mode, torch.no_grad():
        encode(batch.inputs)
    wanted = 3 * (mode.get_total_flops() - positions.get_total_flops())
    assert counted(config, batch) - counted(config, without_media(batch)) == pytest.approx(wanted)


@pytest.mark.parametrize(("image", "audio"), [(False, False), (True, False), (True, True)])
def test_cross_attention_costs_text_that_sees_features_and_these(tmp_path: Path, image: bool, audio: bool) -> None:
    plain = run_config(tmp_path, "part-{0..0}.tar")
    config = load(tmp_path / "run.yaml", ["model.decoder.cross_every=1"])
    batch = batch_of(config, image, audio, [20, 30])
    cross = CrossAttention(config.model.decoder, "math")
    wanted = 0
    for sample in (1, 2):
        features = (batch.tensors.segments_T == sample) & (batch.tensors.features_T >= 0)
        text = (batch.tensors.segments_T == sample) & ~features
        wanted += one_sample(cross, int(text.sum()), int(features.sum())) if features.any() else 0
    extra = counted(config, batch) - counted(plain, batch)
    assert extra == pytest.approx(3 * config.model.decoder.depth * wanted)
    assert bool(extra) is (image or audio)


def one_sample(cross: CrossAttention, text: int, features: int) -> int:
    """What torch counts of its matrix products for so many places of text and of features."""
    wide = cross.q.in_features
    x, memory = torch.zeros(text, wide), torch.zeros(features, wide)
    with FlopCounterMode(display=False) as mode, torch.no_grad():
        q, k, v = (
            part(y).unflatten(-1, (heads, -1))
            for part, y, heads in (
                (cross.q, x, cross.heads),
                (cross.k, memory, cross.kv_heads),
                (cross.v, memory, cross.kv_heads),
            )
        )
        mask = torch.ones(1, 1, text, features, dtype=torch.bool)
        cross.out(masked_attention(q[None], k[None], v[None], mask, backend="math")[0].flatten(1))
        cross.down(cross.gate(x) * cross.up(x))
    return mode.get_total_flops()


def test_padding_and_empty_slots_cost_nothing(config: RunConfig) -> None:
    one, two = batch_of(config, True, True, [5]), batch_of(config, True, True, [5, 5])
    assert counted(config, one, one) == pytest.approx(counted(config, two))


def test_utilisation_is_the_share_of_all_devices_peak() -> None:
    assert mfu(flops=4e12, seconds=2.0, devices=2, peak=10.0) == pytest.approx(0.1)
    assert mfu(4e12, 2.0, 2, None) is None


def test_a_peak_that_nobody_knows_is_not_made_up() -> None:
    cpu = torch.device("cpu")
    assert peak_tflops(cpu, 0.0) is None
    assert peak_tflops(cpu, 2.5) == 2.5
