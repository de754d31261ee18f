"""Samples packed into one sequence train as the same samples do in a padded sequence each."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.config import load
from shared.sections import RunConfig
from tests.support.packs import pack, padded, pick_group
from tests.support.runs import run_file
from trainer.feed import MicroBatch
from trainer.loss import loss_scale, token_loss
from trainer.models import build
from trainer.optim import build_optimizer, clip_gradients, set_lr

CAPTIONS = (20, 7)


def step(config: RunConfig, batch: list[MicroBatch]) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, gradient norm and weights of one optimizer step."""
    model = build.build(config, "sdpa")
    optimizer = build_optimizer(model, config.train.optim)
    set_lr(optimizer.param_groups, config.train.optim.lr)
    losses = [token_loss(model(inputs), *targets) / len(batch) for inputs, targets in batch]
    torch.stack(losses).sum().backward()
    norm = clip_gradients(list(model.parameters()), 0.25, lambda squares: squares)
    optimizer.step()
    return sum(loss.item() for loss in losses), norm, dict(model.named_parameters())


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(("image", "audio"), [(False, False), (True, False), (False, True)])
def test_packed_and_padded_take_the_same_step(tmp_path: Path, image: bool, audio: bool, optimizer: str) -> None:
    sets = [f"train.optim.name={optimizer}", f"train.optim.lr={1e-4 if optimizer == 'adamw' else 0.1}"]
    config = load(run_file(tmp_path, "part-{0..0}.tar"), sets)
    group = pick_group(config, image, audio)
    inputs, labels = pack(config, group, CAPTIONS, torch.Generator().manual_seed(1))
    rows = [padded(group, inputs, labels, sample) for sample in range(len(CAPTIONS))]
    scales = [torch.tensor(loss_scale(count, sum(CAPTIONS))) for count in (1, len(rows))]
    packed = step(config, [(inputs, (labels, scales[0]))])
    apart = step(config, [(inputs, (labels, scales[1])) for inputs, labels in rows])
    assert packed[:2] == pytest.approx(apart[:2], rel=1e-5)
    for name, weight in packed[2].items():
        torch.testing.assert_close(weight, apart[2][name], rtol=0, atol=1e-5, msg=name)
