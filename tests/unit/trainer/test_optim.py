"""Schedule, groups and clipping are plain functions of what they are given."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from shared.sections import OptimSection
from tests.support.runs import run_config
from trainer.models import build
from trainer.optim import build_optimizer, clip_gradients, lr_at, parameter_groups, set_lr

OPTIM = OptimSection(lr=1.0, warmup_steps=10, min_lr_share=0.1)


def test_the_rate_climbs_linearly_then_falls_to_its_floor() -> None:
    rates = [lr_at(step, 110, OPTIM) for step in range(111)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert rates[10] == pytest.approx(1.0)
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == pytest.approx(0.1)


def test_runs_shorter_than_the_warm_up_and_without_one_have_a_rate() -> None:
    assert lr_at(0, 5, OPTIM) == pytest.approx(0.1)
    assert lr_at(0, 5, OptimSection(lr=1.0, warmup_steps=0)) == pytest.approx(1.0)


def test_norms_biases_embeddings_and_positions_do_not_decay(tmp_path: Path) -> None:
    model = build.build(run_config(tmp_path, "part-{0..0}.tar"), "sdpa")
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, others = ({names[id(p)] for p in group["params"]} for group in parameter_groups(model, 0.1))
    assert decayed | others == set(names.values())
    assert not decayed & others
    assert {"1.q.weight", "0.vision.patch.weight", "0.audio.stem.weight"} <= decayed
    assert {"0.embedding.weight", "0.vision.positions_GGC", "1.mlp_norm.weight", "0.audio.stem.bias"} <= others


def test_a_tied_heads_copy_is_stepped_by_nobody_and_costs_no_optimizer_state(tmp_path: Path) -> None:
    model = build.build(run_config(tmp_path, "x.tar"), "sdpa")
    _, vocabulary = build.ends(model)
    assert vocabulary is not None
    vocabulary.weight.tied_copy = True
    stepped = [parameter for group in parameter_groups(model, 0.1) for parameter in group["params"]]
    missing = {id(parameter) for parameter in model.parameters()} - {id(parameter) for parameter in stepped}
    assert missing == {id(vocabulary.weight)}


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_the_optimizer_is_the_one_asked_for_and_takes_the_rate(name: str, kind: type) -> None:
    optimizer = build_optimizer(torch.nn.Linear(2, 2), OptimSection(name=name))
    set_lr(optimizer.param_groups, 0.25)
    assert isinstance(optimizer, kind)
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}


@pytest.mark.parametrize(("clip", "wanted"), [(0.0, 5.0), (10.0, 5.0), (1.0, 1.0)])
def test_clipping_bounds_the_norm_and_reports_it_as_it_was(clip: float, wanted: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    for parameter, gradient in zip(parameters, (3.0, 4.0), strict=True):
        parameter.grad = torch.tensor([gradient])
    assert clip_gradients(parameters, clip, lambda squares: squares) == pytest.approx(5.0)
    assert torch.stack([p.grad for p in parameters]).norm() == pytest.approx(wanted, rel=1e-5)


def test_the_norm_includes_what_other_stages_add() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([3.0])
    assert clip_gradients([parameter], 0.0, lambda squares: squares + 16) == pytest.approx(5.0)
