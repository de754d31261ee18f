"""Tensor parallelism (Shoeybi et al. 2019) as a table applied to a model that was built for one device.

Every rank builds a layer whole, from the same seed, and keeps its slice; so the slices together are the one-device
weights to the last bit. What is not in the table is whole on every rank of the group: it sees equal inputs and equal
gradients, so its copies stay equal. Cut parameters carry `tensor_model_parallel = True`: a gradient norm counts them
on every rank, and the others on tensor rank 0 alone. Names of parameters do not change.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from trainer.parallel.groups import TensorGroup
from trainer.parallel.mappings import copy_to, count_once, reduce_from

Role = Literal["enter", "column", "row", "embedding", "router", "experts"]
"""What becomes of a module:

enter      its output goes to cut modules: whole forward, its gradient summed over the ranks
column     a Linear that keeps a share of its outputs; no communication
row        a Linear without bias that keeps a share of its inputs: its outputs are summed over the ranks
embedding  an Embedding that keeps a share of its rows: its outputs are summed over the ranks
router     whole on every rank, between an `enter` and the experts: the gradient of its input is counted once
experts    `Experts` that keep a share of every inner width: their outputs are summed over the ranks after they were
           combined, so that a token's row travels once, and so are the gradients of the router's weights for them
"""


class Rule(msgspec.Struct, frozen=True):
    """Modules whose path matches `path` whole play `role`; `counts` is an attribute of the parent to divide."""

    path: str
    role: Role
    counts: str = ""


TABLE = (
    Rule(r"\d+\.embedding", "embedding"),
    Rule(r"\d+\.attention_norm", "enter"),
    Rule(r"\d+\.q", "column", counts="heads"),
    Rule(r"\d+\.k", "column", counts="kv_heads"),
    Rule(r"\d+\.v", "column"),
    Rule(r"\d+\.out", "row"),
    Rule(r"\d+\.(mlp_norm|expert_norm)", "enter"),
    Rule(r"\d+\.(gate|up)", "column"),
    Rule(r"\d+\.down", "row"),
    Rule(r"\d+\.router", "router"),
    Rule(r"\d+\.experts", "experts"),
    Rule(r"\d+\.norm", "enter"),
    Rule(r"\d+\.vocabulary", "column"),
)
"""Decoder and head, and the token embedding. The encoders stand deeper in their layer and so in no rule: whole.

Every expert is cut, instead of some given to each rank: all hold the same tokens, and none waits for one with more.
"""

DIMS: dict[Role, dict[str, int]] = {
    "enter": {},
    "column": {"weight": 0, "bias": 0},
    "row": {"weight": 1},
    "embedding": {"weight": 0},
    "router": {},
    "experts": {"gate": 1, "up": 1, "down": 2},
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


def mark_cut(parameter: Tensor) -> None:
    """Let `is_cut` be true of it."""
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


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
        return reduce_from(rows, self._group)


Mapping = Callable[[Tensor, TensorGroup], Tensor]
BEFORE: dict[Role, dict[int, Mapping]] = {"router": {0: count_once}, "experts": {1: copy_to}}
"""What becomes of a module's arguments, by their places."""
AFTER: dict[Role, Mapping] = {"enter": copy_to, "row": reduce_from, "experts": reduce_from}
"""What becomes of its output."""


def _connect(part: nn.Module, role: Role, group: TensorGroup) -> None:
    if role == "row" and getattr(part, "bias", None) is not None:
        raise ValueError("a Linear cut by rows must have no bias: every rank would add it")
    if role in BEFORE:
        part.register_forward_pre_hook(partial(_map_arguments, BEFORE[role], group))
    if role in AFTER:
        part.register_forward_hook(lambda _, inputs, out: AFTER[role](out, group))


def _map_arguments(mappings: dict[int, Mapping], group: TensorGroup, part: nn.Module, given: tuple[Any, ...]) -> Any:
    return tuple(mappings[at](x, group) if at in mappings else x for at, x in enumerate(given))


def _keep_slice(part: nn.Module, name: str, dim: int, group: TensorGroup) -> None:
    whole: nn.Parameter | None = getattr(part, name)
    if whole is None:
        return
    size = _share(whole.shape[dim], group, f"{type(part).__name__}.{name}")
    piece = whole.detach().narrow(dim, group.rank * size, size).clone(memory_format=torch.contiguous_format)
    held = nn.Parameter(piece, whole.requires_grad)
    mark_cut(held)
    setattr(part, name, held)


def _share(size: int, group: TensorGroup, name: str) -> int:
    if size % group.size:
        raise ValueError(f"{name} is {size}, which {group.size} tensor-parallel ranks cannot share")
    return size // group.size
