"""A decoder block with a mixture of SwiGLU experts, written for one device.

Shapes: T places of the pack, C the width, E experts, K experts of a token, F an expert's inner width, A assignments
(a token and one of its experts) that are computed, sorted by expert and then by place.

A token's K experts are those of the largest router probabilities. For K > 1 their outputs are weighted by these,
made to sum to 1 (Mixtral: Jiang et al. 2024, section 2.1); for K = 1 by the probability itself (Switch: Fedus et al.
2021, equation 2), for a single weight made to sum to 1 is always 1 and would teach the router nothing. The router
works in fp32. Padding is sent nowhere, counts in no loss and gets zeros.

The auxiliary losses of a micro-batch enter its gradient here, at their own layer, so no pipeline stage has to hand
them on (`AddLoss`). A micro-batch is the same whatever the layout, so its auxiliary losses are too.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shared.model_sections import DecoderSection
from trainer.models.attention import Backend
from trainer.models.decoder import AttentionBlock


class Plan(NamedTuple):
    """What goes where: `order_A` indexes the T x K assignments laid end to end; counts of each expert, asked and kept.

    Kept assignments are sorted by expert; within one by place, so what a full expert drops is the pack's end.
    """

    order_A: Tensor
    asked_E: Tensor
    kept_E: Tensor


class Router(nn.Linear):
    """[..., C] in any dtype -> logits [..., E] in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """The weights are taken in fp32 too, whatever they are kept in."""
        return F.linear(x.float(), self.weight.float())


class Experts(nn.Module):
    """E SwiGLU networks side by side: gate and up [E, F, C], down [E, C, F].

    `compute` runs rows through them, wherever they are. Every parameter gets a gradient from every call, zeros for
    experts without rows.
    """

    def __init__(self, section: DecoderSection) -> None:
        super().__init__()
        shape = (section.experts, section.expert_size, section.dim)
        self.gate = nn.Parameter(torch.empty(shape))
        self.up = nn.Parameter(torch.empty(shape))
        self.down = nn.Parameter(torch.empty(shape[0], shape[2], shape[1]))
        for weight, std in ((self.gate, 0.02), (self.up, 0.02), (self.down, 0.02 / math.sqrt(2 * section.depth))):
            nn.init.normal_(weight, std=std)
        self.compute: Compute = here

    def forward(self, x_TC: Tensor, weights_TK: Tensor, plan: Plan) -> Tensor:
        """[T, C]: each token's experts, weighted and added up; zeros for what the plan does not keep."""
        rows_AC = repeat(x_TC, weights_TK.shape[1]).index_select(0, plan.order_A)
        return combine(self.compute(rows_AC, plan.kept_E, self), plan.order_A, weights_TK)

    def run(self, rows_AC: Tensor, counts_E: Tensor) -> Tensor:
        """[A, C]: each row through its expert; the first counts_E[0] rows are expert 0's, and so on."""
        inner = F.silu(grouped_linear(rows_AC, self.gate, counts_E)) * grouped_linear(rows_AC, self.up, counts_E)
        return grouped_linear(inner, self.down, counts_E)


Compute = Callable[[Tensor, Tensor, Experts], Tensor]
"""rows_AC and counts_E, both of all experts, and the experts held here -> [A, C]."""


def here(rows_AC: Tensor, counts_E: Tensor, experts: Experts) -> Tensor:
    """All experts are on this device."""
    return experts.run(rows_AC, counts_E)


class Tally:
    """Sums over a step's micro-batches: assignments asked of each expert, kept, both losses, batches with tokens."""

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self.sums = torch.zeros(experts + 4, dtype=torch.float64)

    def add(self, plan: Plan, balance: Tensor, z: Tensor) -> None:
        """Count one micro-batch."""
        asked = plan.asked_E.sum()
        now = torch.cat([plan.asked_E, torch.stack([plan.kept_E.sum(), balance.detach(), z.detach(), asked > 0])])
        self.sums = self.sums.to(now.device) + now.double()

    def take(self) -> Tensor:
        """[E + 4] sums since the last call."""
        sums, self.sums = self.sums, torch.zeros_like(self.sums)
        return sums


class ExpertBlock(AttentionBlock):
    """A block whose feed-forward is a mixture of experts.

    `loss_weight` is what the engine multiplies a micro-batch's loss by before its backward pass (1 over the
    micro-batches that one rank accumulates).
    """

    def __init__(self, section: DecoderSection, backend: Backend, places: int, crosses: bool = False) -> None:
        super().__init__(section, backend, places)
        self.per_token, self.capacity_factor = section.experts_per_token, section.capacity_factor
        self.balance_loss, self.router_z_loss = section.balance_loss, section.router_z_loss
        self.loss_weight, self.tally = 1.0, Tally(section.experts)
        self.expert_norm = nn.RMSNorm(section.dim, eps=section.norm_eps)
        self.router = Router(section.dim, section.experts, bias=False)
        self.experts = Experts(section)
        self.finish(section, crosses)

    def feed_forward(self, hidden_TC: Tensor, segments_T: Tensor) -> Tensor:
        """Weighted outputs of each token's experts; zeros for padding and for what was dropped."""
        x, valid_T = self.expert_norm(hidden_TC), segments_T > 0
        logits_TE: Tensor = self.router(x)
        probs_TE = logits_TE.softmax(-1)
        ids_TK, weights_TK = choose(probs_TE, self.per_token)
        plan = make_plan(ids_TK, valid_T, self.tally.experts, self.capacity_factor)
        out: Tensor = self.experts(x, weights_TK, plan)
        balance, z = balance_loss(probs_TE, valid_T, plan.asked_E), z_loss(logits_TE, valid_T)
        loss = self.balance_loss * balance + self.router_z_loss * z
        return add_loss(out, loss, self.loss_weight, lambda: self.tally.add(plan, balance, z))


def expert_blocks(model: nn.Module) -> Iterator[tuple[str, ExpertBlock]]:
    """Path and module of every block of a model, or of a stage of it, that has experts."""
    return ((path, part) for path, part in model.named_modules() if isinstance(part, ExpertBlock))


def weigh_losses(model: nn.Module, weight: float) -> None:
    """Give every block its `loss_weight`."""
    for _, block in expert_blocks(model):
        block.loss_weight = weight


def choose(probs_TE: Tensor, per_token: int) -> tuple[Tensor, Tensor]:
    """ids_TK of the largest probabilities, largest first, and the weights_TK of their outputs in fp32."""
    weights, ids = probs_TE.topk(per_token, dim=-1)
    return ids, weights / weights.sum(-1, keepdim=True) if per_token > 1 else weights


def make_plan(ids_TK: Tensor, valid_T: Tensor, experts: int, capacity_factor: float) -> Plan:
    """Sort assignments by expert and keep at most ceil(capacity_factor x all / E) of each (0: keep all)."""
    experts_of, order = ids_TK.masked_fill(~valid_T[:, None], experts).flatten().sort(stable=True)
    starts = torch.searchsorted(experts_of, torch.arange(experts + 1, device=ids_TK.device))
    asked = starts.diff()
    capacity = torch.ceil(starts[-1].double() * capacity_factor / experts) if capacity_factor else starts[-1]
    place = torch.arange(len(order), device=ids_TK.device) - starts[experts_of]
    kept = (experts_of < experts) & (place < capacity)
    return Plan(order[kept], asked, asked.clamp(max=capacity.long()))


def repeat(x_TC: Tensor, times: int) -> Tensor:
    """[T x times, C]: a row for each assignment. Its backward, unlike a gather's, adds in one order."""
    return x_TC[:, None].expand(-1, times, -1).flatten(0, 1)


def combine(rows_AC: Tensor, order_A: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, C]: each token's outputs times their weights, summed in fp32; an assignment without a row adds nothing."""
    padded = torch.cat([rows_AC.new_zeros(1, rows_AC.shape[1]), rows_AC])
    row_of = torch.zeros(weights_TK.numel(), dtype=torch.long, device=rows_AC.device)
    row_of[order_A] = torch.arange(1, len(order_A) + 1, device=rows_AC.device)
    outputs_TKC = padded.index_select(0, row_of).view(*weights_TK.shape, -1)
    return (outputs_TKC.float() * weights_TK[..., None]).sum(1).to(rows_AC.dtype)


def balance_loss(probs_TE: Tensor, valid_T: Tensor, asked_E: Tensor) -> Tensor:
    """E x sum over experts of (its share of assignments x its mean probability): 1 where both are even.

    Switch's equation 4 (Fedus et al. 2021), with the share taken over all K choices.
    """
    mean_E = (probs_TE * valid_T[:, None]).sum(0) / valid_T.sum().clamp(min=1)
    share_E = asked_E / asked_E.sum().clamp(min=1)
    return len(asked_E) * (share_E * mean_E).sum()


def z_loss(logits_TE: Tensor, valid_T: Tensor) -> Tensor:
    """Mean over tokens of the squared log of the sum of exponentials: ST-MoE's equation 5 (Zoph et al. 2022)."""
    squares_T = logits_TE.logsumexp(-1).square()
    return (squares_T * valid_T).sum() / valid_T.sum().clamp(min=1)


class AddLoss(torch.autograd.Function):
    """Identity on `out`; its backward gives `loss` the gradient `weight`, as if it had been added to the main loss.

    As Megatron-LM's MoEAuxLossAutoScaler. `note` is called when the gradient passes: once a micro-batch, also where
    the forward pass is run again to recompute activations.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor, weight: float, note: Callable[[], None]) -> Tensor:
        ctx.weight, ctx.note, ctx.like = weight, note, loss.new_empty(())
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.note()
        return gradient, torch.full_like(ctx.like, ctx.weight), None, None


def add_loss(out: Tensor, loss: Tensor, weight: float, note: Callable[[], None]) -> Tensor:
    """`out`, with the gradient of `weight` x `loss` added to whatever led to it."""
    found: Tensor = AddLoss.apply(out, loss, weight, note)  # type: ignore[no-untyped-call]
    return found


def grouped_linear(rows_AC: Tensor, weight_EFC: Tensor, counts_E: Tensor) -> Tensor:
    """[A, F]: each run of rows times its expert's weight; one kernel in bf16 on CUDA, a loop elsewhere."""
    if rows_AC.is_cuda and rows_AC.dtype == torch.bfloat16 and len(rows_AC) and _aligned(weight_EFC):
        return F.grouped_mm(rows_AC, weight_EFC.transpose(1, 2), offs=counts_E.cumsum(0).int())
    runs = torch.split(rows_AC, counts_E.tolist())
    return torch.cat([F.linear(run, weight) for run, weight in zip(runs, weight_EFC, strict=True)])


def _aligned(weight_EFC: Tensor) -> bool:
    """Whether rows in and out begin at multiples of 16 bytes, as the grouped kernel needs."""
    return all(size * weight_EFC.element_size() % 16 == 0 for size in weight_EFC.shape[1:])
