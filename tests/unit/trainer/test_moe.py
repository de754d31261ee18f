"""A mixture of experts on one device: the routing of a dense reference, and losses that count tokens alone."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shared.config import load
from shared.model_sections import DecoderSection
from tests.support.packs import MIXED, global_batch
from tests.support.runs import run_config
from trainer.loss import token_loss
from trainer.models import build
from trainer.models.moe import ExpertBlock, balance_loss, choose, expert_blocks, make_plan, z_loss

CONFIGS = Path(__file__).parents[3] / "deploy/configs"
EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_mlp": 24, "balance_loss": 0.5, "router_z_loss": 0.1}


def block(seed: int = 0, **changes: float) -> ExpertBlock:
    """A block with experts whose router takes sides."""
    torch.manual_seed(seed)
    section = DecoderSection(dim=16, depth=1, heads=2, kv_heads=1, mlp=32, **{**EXPERTS, **changes})  # type: ignore[arg-type]
    made = ExpertBlock(section, "sdpa", 64)
    torch.nn.init.normal_(made.router.weight, std=1.0)
    return made


def tokens(padding: int = 3, seed: int = 1) -> tuple[Tensor, Tensor]:
    """hidden_TC of 20 tokens and some padding, and segments_T."""
    random = torch.Generator().manual_seed(seed)
    segments = torch.tensor([1] * 12 + [2] * 8 + [0] * padding)
    return torch.randn(len(segments), 16, generator=random, requires_grad=True), segments


def dense(made: ExpertBlock, hidden: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
    """The reference: every expert computes every token, weights mask; and the auxiliary loss, written out."""
    x = made.expert_norm(hidden)
    logits = made.router(x)
    probs = logits.softmax(-1)
    valid = segments > 0
    top = probs.topk(made.per_token)
    mask = torch.zeros_like(probs).scatter(1, top.indices, 1.0) * valid[:, None]
    weights = probs * mask
    if made.per_token > 1:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
    each = [
        F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        for gate, up, down in zip(*made.experts.parameters(), strict=True)
    ]
    out = torch.stack([y * weights[:, e, None] for e, y in enumerate(each)]).sum(0)
    share, mean = mask[valid].mean(0) / made.per_token, probs[valid].mean(0)
    balance = 4 * (share.detach() * mean).sum()
    return out, made.balance_loss * balance + made.router_z_loss * logits[valid].logsumexp(-1).square().mean()


@pytest.mark.parametrize("per_token", [1, 2, 3, 4])
def test_output_and_gradients_are_those_of_all_experts_computed_and_masked(per_token: int) -> None:
    made, direction = block(experts_per_token=per_token), torch.randn(23, 16)
    made.loss_weight = 0.25
    hidden, segments = tokens()
    inputs = [hidden, *made.parameters()]
    out = made.feed_forward(hidden, segments)
    found = torch.autograd.grad((out * direction).sum(), inputs, allow_unused=True)
    wanted_out, loss = dense(made, hidden, segments)
    wanted = torch.autograd.grad((wanted_out * direction).sum() + 0.25 * loss, inputs, allow_unused=True)
    torch.testing.assert_close(out, wanted_out, rtol=1e-5, atol=1e-6)
    names = ["hidden", *(name for name, _ in made.named_parameters())]
    for name, ours, theirs in zip(names, found, wanted, strict=True):
        assert (ours is None) == (theirs is None), name
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=name)
    assert made.tally.take()[:4].sum() == 20 * per_token


def test_padding_changes_nothing_and_gets_zeros() -> None:
    made = block(capacity_factor=0.8)
    results = []
    for padding in (0, 7):
        hidden, segments = tokens(padding)
        with torch.no_grad():
            hidden[20:] = 100.0
        out = made.feed_forward(hidden, segments)
        (gradient,) = torch.autograd.grad(out.square().sum(), hidden)
        results.append((out[:20], gradient[:20], made.tally.take()))
        assert not out[20:].any() and not gradient[20:].any()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_losses_are_one_where_even_and_count_tokens_alone() -> None:
    valid = torch.tensor([True] * 8 + [False] * 5)
    even = torch.zeros(13, 4)
    plan = make_plan(torch.arange(13)[:, None] % 4, valid, 4, 0.0)
    assert float(balance_loss(even.softmax(-1), valid, plan.asked_E)) == pytest.approx(1.0)
    assert float(z_loss(even, valid)) == pytest.approx(torch.tensor(4.0).log().square().item())
    one_sided = torch.zeros(13, 4)
    one_sided[:8, 2] = 50.0
    ids, _ = choose(one_sided.softmax(-1), 1)
    asked = make_plan(ids, valid, 4, 0.0).asked_E
    assert float(balance_loss(one_sided.softmax(-1), valid, asked)) == pytest.approx(4.0)


def test_a_full_expert_drops_the_end_of_the_pack_and_nothing_else() -> None:
    ids = torch.tensor([[0], [0], [1], [0], [0], [2], [0], [3]])
    valid = torch.ones(8, dtype=torch.bool)
    plan = make_plan(ids, valid, 4, 1.5)
    assert plan.asked_E.tolist() == [5, 1, 1, 1]
    assert plan.kept_E.tolist() == [3, 1, 1, 1]
    assert plan.order_A.tolist() == [0, 1, 3, 2, 5, 7]
    valid[0] = False
    assert make_plan(ids, valid, 4, 1.5).order_A.tolist() == [1, 3, 4, 2, 5, 7]
    assert make_plan(ids, valid, 4, 0.0).kept_E.tolist() == [4, 1, 1, 1]


def test_what_is_dropped_passes_by_and_is_the_same_every_time() -> None:
    made = block(capacity_factor=0.5, experts_per_token=1)
    hidden, segments = tokens()
    outs = [made.feed_forward(hidden, segments) for _ in range(2)]
    assert torch.equal(outs[0], outs[1])
    outs[0].sum().backward()
    asked, kept = made.tally.take()[:4], made.tally.sums
    dropped = int((~outs[0][:20].any(1)).sum())
    assert dropped == int((asked - asked.clamp(max=3)).sum()) > 0
    assert not kept.any()


@pytest.mark.parametrize("empty", ["pack", "expert"])
def test_without_tokens_every_parameter_still_gets_a_gradient_of_zeros(empty: str) -> None:
    made = block()
    hidden, segments = tokens()
    if empty == "pack":
        segments = torch.zeros_like(segments)
    else:
        with torch.no_grad():
            made.expert_norm.weight.fill_(1.0)
            made.router.weight[3] = 0
            made.router.weight[:3] = made.router.weight[0]
            hidden += made.router.weight[0]
    made.feed_forward(hidden, segments).sum().backward()
    for name, parameter in (*made.experts.named_parameters(), ("router", made.router.weight)):
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
    if empty == "pack":
        assert not any(parameter.grad.any() for parameter in made.experts.parameters())
    else:
        assert made.tally.take()[3] == 0
        assert not any(parameter.grad[3].any() for parameter in made.experts.parameters())
        assert all(parameter.grad[:3].any() for parameter in made.experts.parameters())


def test_recomputing_activations_counts_a_micro_batch_once() -> None:
    made = block()
    hidden, segments = tokens()
    torch.utils.checkpoint.checkpoint(made.feed_forward, hidden, segments, use_reentrant=False).sum().backward()
    assert made.tally.take()[-1] == 1


@pytest.mark.parametrize("every", [1, 2])
def test_every_nth_block_has_experts_and_every_parameter_a_gradient(tmp_path: Path, every: int) -> None:
    changes = {"decoder": {**EXPERTS, "depth": 4, "expert_every": every}}
    config = run_config(tmp_path, "x.tar", model=changes)
    model = build.build(config, "sdpa")
    assert [path for path, _ in expert_blocks(model)] == [str(i + 1) for i in range(every - 1, 4, every)]
    for inputs, targets in global_batch(config, MIXED, seed=0):
        model.zero_grad()
        token_loss(model(inputs), *targets).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_preset_has_the_parameters_that_its_comment_says() -> None:
    config = load(CONFIGS / "debug-moe.yaml")
    model = build.build(config, "sdpa")
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total == sum(build.parameter_counts(config))
    idle = 6 / 8 * sum(p.numel() for _, each in expert_blocks(model) for p in each.experts.parameters())
    assert build.active_parameter_count(config) == total - idle
    words = f"{total:,} weights, of which a token passes through {build.active_parameter_count(config):,}"
    assert words in (CONFIGS / "debug-moe.yaml").read_text()
