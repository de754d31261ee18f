"""The model on one device: towers, merge, packing, and gradients for every parameter whatever the batch holds."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from shared.sections import RunConfig
from tests.support.packs import MIXED, Plan, global_batch
from tests.support.runs import run_config
from trainer.loss import token_loss
from trainer.models import build
from trainer.models.audio import AudioTower
from trainer.models.decoder import Rotary, rotate
from trainer.models.fusion import merge_features
from trainer.models.vision import merge_patches, resample


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return run_config(tmp_path, "part-{0..0}.tar")


@pytest.mark.parametrize(("height", "width"), [(4, 4), (2, 8), (7, 3), (1, 1), (16, 9)])
def test_resampling_is_bilinear_interpolation(height: int, width: int) -> None:
    grid = torch.randn(4, 4, 6)
    wanted = F.interpolate(grid.permute(2, 0, 1)[None], (height, width), mode="bilinear", align_corners=False)
    torch.testing.assert_close(resample(grid, height, width), wanted[0].permute(1, 2, 0))


def test_merging_is_a_pixel_unshuffle() -> None:
    x = torch.randn(2, 4, 6, 5)
    wanted = F.pixel_unshuffle(x.permute(0, 3, 1, 2), 2).unflatten(1, (5, 4)).permute(0, 3, 4, 2, 1)
    assert torch.equal(merge_patches(x, 2), wanted.reshape(2, 6, 20))


def test_features_stand_where_the_batch_says() -> None:
    embedded, rows = torch.zeros(5, 2), torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    merged, memory = merge_features(embedded, rows, torch.tensor([-1, 1, 0, -1, -1]))
    assert merged[:, 0].tolist() == memory[:, 0].tolist() == [0, 2, 1, 0, 0]


@pytest.mark.parametrize("plan", MIXED, ids=str)
def test_every_parameter_has_a_gradient_and_an_absent_modality_gets_zeros(config: RunConfig, plan: Plan) -> None:
    model = build.build(config, "sdpa")
    ((inputs, targets),) = global_batch(config, [plan], seed=0)
    token_loss(model(inputs), *targets).backward()
    image, audio, captions = plan
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        absent = (".vision" in name and not image) or (".audio" in name and not audio) or not sum(captions)
        assert bool(parameter.grad.any()) is not absent, name


def test_a_sample_gets_the_same_logits_alone_and_packed(config: RunConfig) -> None:
    model = build.build(config, "sdpa")
    ((inputs, _),) = global_batch(config, [(False, False, (20, 30))], seed=0)
    tokens, positions, segments, features, _, *media = inputs
    second = segments == 2
    alone = [torch.zeros_like(tokens), torch.zeros_like(positions), torch.zeros_like(segments)]
    for whole, part in zip((tokens, positions, segments), alone, strict=True):
        part[: int(second.sum())] = whole[second]
    together, single = model(inputs), model((*alone, features, inputs[4], *media))
    torch.testing.assert_close(single[: int(second.sum())], together[second], rtol=1e-4, atol=1e-5)


def test_frames_beyond_a_clip_change_nothing(config: RunConfig) -> None:
    tower = AudioTower(config.model.audio, 5, "sdpa")
    mels, lengths = torch.randn(1, 80, 100), torch.tensor([60])
    before = tower(mels, lengths)
    mels[..., 64:] = 9.0
    assert torch.equal(before[:, :6], tower(mels, lengths)[:, :6])


def test_rotary_scores_depend_on_distance_alone() -> None:
    q, k, rotary = torch.randn(1, 1, 8), torch.randn(1, 1, 8), Rotary(106, 8, 10_000.0)

    def score(at_q: int, at_k: int) -> torch.Tensor:
        turned = [rotate(x, *rotary(torch.tensor([at]))) for x, at in ((q, at_q), (k, at_k))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100), rtol=1e-4, atol=1e-5)
    assert abs(score(9, 4) - score(9, 8)) > 1e-3


def test_rotary_angles_stay_exact_in_a_model_of_bf16() -> None:
    at = torch.tensor([0, 1, 999])
    cos, sin = Rotary(1000, 8, 10_000.0).bfloat16()(at)
    angles = at[:, None] * 10_000.0 ** (-torch.arange(4) / 4).double()
    torch.testing.assert_close(torch.complex(cos, sin)[:, 0], torch.polar(torch.ones(3, 4), angles.float()))


def test_weights_follow_from_the_seed_and_the_place_alone(config: RunConfig) -> None:
    torch.manual_seed(1)
    one = build.build(config, "sdpa").state_dict()
    torch.manual_seed(2)
    other = build.build(config, "sdpa").state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["1.q.weight"], one["2.q.weight"])


def test_parameters_are_counted_without_building(config: RunConfig) -> None:
    model = build.build(config, "sdpa")
    counts = [sum(p.numel() for p in part.parameters()) for part in model.children()]
    assert build.parameter_counts(config) == counts


def test_bf16_stays_near_fp32(config: RunConfig) -> None:
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        model = build.build(config, "sdpa").to(dtype)
        batch = global_batch(config, MIXED, seed=0)
        with torch.no_grad():
            losses.append(sum(float(token_loss(model(inputs), *targets)) for inputs, targets in batch) / len(batch))
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def test_a_table_of_positions_left_in_fp32_does_not_widen_half_precision(tmp_path: Path) -> None:
    """DeepSpeed casts parameters and leaves buffers as they are."""
    config = run_config(tmp_path, "part-{0..0}.tar", model={"audio": {"positions": "table", "key_bias": False}})
    model = build.build(config, "sdpa")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    ((inputs, _),) = global_batch(config, [(False, True, (5,))], seed=0)
    assert model(inputs).dtype == torch.bfloat16
