"""Tensor parallelism (Shoeybi et al. 2019) as a table applied to a model that was built for one device.

Every rank builds a layer whole, from the same seed, and keeps its slice; so the slices together are the one-device
weights to the last bit. What is not in the table is whole on every rank of the group: it sees equal inputs and equal
gradients, so its copies stay equal. Cut parameters carry `tensor_model_parallel = True`: a gradient norm counts them
on every rank, and the others on tensor rank 0 alone. Names of parameters do not change.
"""

import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from trainer.parallel.groups import TensorGroup

Role = Literal["enter", "column", "row", "embedding"]
"""What becomes of a module:

enter      its output goes to column-cut modules only: whole forward, its gradient summed over the ranks
column     a Linear that keeps a share of its outputs; no communication
row        a Linear without bias that keeps a share of its inputs: its outputs are summed over the ranks
embedding  an Embedding that keeps a share of its rows: its outputs are summed over the ranks
"""


class Rule(msgspec.Struct, frozen=True):
    """Modules whose path matches `path` whole play `role`; `counts` is an attribute of the parent to divide."""

    path: str
    role: Role
    counts: str = ""


TABLE = (
    Rule(r"\d+\.embedding", "embedding"),
    Rule(r"\d+\.(cross\.)?attention_norm", "enter"),
    Rule(r"\d+\.cross\.memory_norm", "enter"),
    Rule(r"\d+\.(cross\.)?q", "column", counts="heads"),
    Rule(r"\d+\.(cross\.)?k", "column", counts="kv_heads"),
    Rule(r"\d+\.(cross\.)?v", "column"),
    Rule(r"\d+\.(cross\.)?out", "row"),
    Rule(r"\d+\.(cross\.)?mlp_norm", "enter"),
    Rule(r"\d+\.(cross\.)?(gate|up)", "column"),
    Rule(r"\d+\.(cross\.)?down", "row"),
    Rule(r"\d+\.norm", "enter"),
    Rule(r"\d+\.vocabulary", "column"),
)
"""Decoder and head, and the token embedding. The encoders stand deeper in their layer and so in no rule: whole."""

DIMS: dict[Role, dict[str, int]] = {
    "enter": {},
    "column": {"weight": 0, "bias": 0},
    "row": {"weight": 1},
    "embedding": {"weight": 0},
}
"""The dimension along which each parameter of a role is cut."""


def split(model: nn.Module, group: TensorGroup) -> None:
    """Cut a whole model, or the pipeline stage of it that this rank holds, down to this rank's share, in place.

    Raises:
        ValueError: a size is not a multiple of the group's, or a row-cut Linear has a bias.
    """
    for path, part in list(model.named_modules()):
        rule = rule_of(path)
        if rule is None:
            continue
        parent, _, name = path.rpartition(".")
        if rule.counts:
            owner = model.get_submodule(parent)
            setattr(owner, rule.counts, _share(getattr(owner, rule.counts), group, f"{parent}.{rule.counts}"))
        for parameter, dim in DIMS[rule.role].items():
            _keep_slice(part, parameter, dim, group)
        if rule.role == "embedding":
            part = SlicedEmbedding(part.weight, group)
            model.get_submodule(parent).register_module(name, part)
        _connect(part, rule.role, group)


def rule_of(path: str) -> Rule | None:
    """The table's rule for a module, if any."""
    return next((rule for rule in TABLE if re.fullmatch(rule.path, path)), None)


def cut_dim(parameter: str) -> int | None:
    """The dimension along which a parameter of the model is cut, by its name; None for one that every rank has whole.

    >>> cut_dim("1.q.weight"), cut_dim("1.down.weight"), cut_dim("0.vision.norm.weight")
    (0, 1, None)
    """
    path, _, name = parameter.rpartition(".")
    rule = rule_of(path)
    return DIMS[rule.role].get(name) if rule else None


def is_cut(parameter: Tensor) -> bool:
    """Whether each rank of the tensor group has another slice of it."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


class SlicedEmbedding(nn.Embedding):
    """This rank's rows of an embedding: [...] tokens of the whole vocabulary -> [..., C], the same on every rank.

    Every token is one rank's and zero on the others, so the sum adds nothing to it: it is exact in any dtype.
    """

    def __init__(self, rows_VC: nn.Parameter, group: TensorGroup) -> None:
        super().__init__(rows_VC.shape[0], rows_VC.shape[1], _weight=rows_VC)
        self.weight, self._group = rows_VC, group

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up what is held here, zeros for the rest, and sum over the ranks."""
        at = tokens - self._group.rank * self.num_embeddings
        absent = (at < 0) | (at >= self.num_embeddings)
        rows = super().forward(at.masked_fill(absent, 0)).masked_fill(absent[..., None], 0)
        return _reduce_from(rows, self._group)


class _CopyTo(torch.autograd.Function):
    """Identity; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.total(gradients[0]), None


class _ReduceFrom(torch.autograd.Function):
    """Sum over the ranks; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        return group.total(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _copy_to(x: Tensor, group: TensorGroup) -> Tensor:
    out: Tensor = _CopyTo.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def _reduce_from(x: Tensor, group: TensorGroup) -> Tensor:
    out: Tensor = _ReduceFrom.apply(x, group)  # type: ignore[no-untyped-call]
    return out


AFTER: dict[Role, Callable[[Tensor, TensorGroup], Tensor]] = {"enter": _copy_to, "row": _reduce_from}


def _connect(part: nn.Module, role: Role, group: TensorGroup) -> None:
    if role == "row" and getattr(part, "bias", None) is not None:
        raise ValueError("a Linear cut by rows must have no bias: every rank would add it")
    if role in AFTER:
        part.register_forward_hook(lambda _, inputs, out: AFTER[role](out, group))


def _keep_slice(part: nn.Module, name: str, dim: int, group: TensorGroup) -> None:
    whole: nn.Parameter | None = getattr(part, name)
    if whole is None:
        return
    size = _share(whole.shape[dim], group, f"{type(part).__name__}.{name}")
    piece = whole.detach().narrow(dim, group.rank * size, size).clone(memory_format=torch.contiguous_format)
    held = nn.Parameter(piece, whole.requires_grad)
    held.tensor_model_parallel = True  # type: ignore[attr-defined]
    setattr(part, name, held)


def _share(size: int, group: TensorGroup, name: str) -> int:
    if size % group.size:
        raise ValueError(f"{name} is {size}, which {group.size} tensor-parallel ranks cannot share")
    return size // group.size
