"""Tensor parallelism (Shoeybi et al. 2019) as a table applied to a model that was built for one device.

Every rank builds a layer whole, from the same seed, and keeps its slice; so the slices together are the one-device
weights to the last bit. What is not in the table is whole on every rank of the group: it sees equal inputs and equal
gradients, so its copies stay equal. Cut parameters carry `tensor_model_parallel = True`: a gradient norm counts them
on every rank, and the others on tensor rank 0 alone. Names of parameters do not change.

With `places` (sequence parallelism: Korthikanti et al. 2022) the hidden values between cut layers, where norms and
sums are, are shared out: rank r of n has places r T/n .. (r + 1) T/n of a pack. Where else their sums would be summed
over the ranks, they are summed and shared out, and where a cut layer takes them they are gathered: the same bytes on
the way, an n-th of them kept. A norm's weights then see a rank's places alone, and their gradients are summed.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from trainer.models.decoder import State
from trainer.parallel.groups import TensorGroup
from trainer.parallel.mappings import copy_to, count_once, gather, reduce_from, reduce_scatter, scatter

Role = Literal["enter", "column", "row", "embedding", "router", "experts", "encode"]
"""What becomes of a module:

enter      a norm whose output goes to cut modules: whole forward, its gradient summed over the ranks
column     a Linear that keeps a share of its outputs; no communication
row        a Linear without bias that keeps a share of its inputs: its outputs are summed over the ranks
embedding  an Embedding that keeps a share of its rows: its outputs are summed over the ranks
router     whole on every rank, between an `enter` and the experts: the gradient of its input is counted once
experts    `Experts` that keep a share of every inner width: their outputs are summed over the ranks after they were
           combined, so that a token's row travels once, and so are the gradients of the router's weights for them
encode     whole on every rank; it gives the first `State`, which is shared out with `places`
"""


class Rule(msgspec.Struct, frozen=True):
    """Modules whose path matches `path` whole play `role`; `counts` is an attribute of the parent to divide."""

    path: str
    role: Role
    counts: str = ""


TABLE = (
    Rule(r"0", "encode"),
    Rule(r"\d+\.embedding", "embedding"),
    Rule(r"\d+\.(cross\.)?attention_norm", "enter"),
    Rule(r"\d+\.cross\.memory_norm", "enter"),
    Rule(r"\d+\.(cross\.)?q", "column", counts="heads"),
    Rule(r"\d+\.(cross\.)?k", "column", counts="kv_heads"),
    Rule(r"\d+\.(cross\.)?v", "column"),
    Rule(r"\d+\.(cross\.)?out", "row"),
    Rule(r"\d+\.((cross\.)?mlp_norm|expert_norm)", "enter"),
    Rule(r"\d+\.(cross\.)?(gate|up)", "column"),
    Rule(r"\d+\.(cross\.)?down", "row"),
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
    "encode": {},
    "experts": {"gate": 1, "up": 1, "down": 2},
}
"""The dimension along which each parameter of a role is cut."""


def split(model: nn.Module, group: TensorGroup, places: bool = False) -> None:
    """Cut a whole model, or the pipeline stage of it that this rank holds, down to this rank's share, in place.

    With `places` the group's size must divide a pack's places.

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
        _connect(part, rule.role, group, places)


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
AFTER: dict[bool, dict[Role, Mapping]] = {
    False: {"enter": copy_to, "row": reduce_from, "experts": reduce_from},
    True: {"enter": gather, "row": reduce_scatter, "experts": reduce_scatter},
}
"""What becomes of its output, without and with `places`."""


def _connect(part: nn.Module, role: Role, group: TensorGroup, places: bool) -> None:
    if role == "row" and getattr(part, "bias", None) is not None:
        raise ValueError("a Linear cut by rows must have no bias: every rank would add it")
    if role in BEFORE:
        part.register_forward_pre_hook(partial(_map_arguments, BEFORE[role], group))
    if mapping := AFTER[places].get(role):
        part.register_forward_hook(lambda _, inputs, out: mapping(out, group))
    if places and role == "encode":
        part.register_forward_hook(lambda _, inputs, state: _share_places(state, group))
    if places and role == "enter":
        for weight in (p for p in part.parameters() if p.requires_grad):
            weight.register_hook(group.total)  # type: ignore[no-untyped-call]


def _share_places(state: State, group: TensorGroup) -> State:
    """Hidden values and what says where their gradient stops; the rest is attention's, which sees all places."""
    hidden, positions, segments, cu_seqlens, modalities = state
    return scatter(hidden, group), positions, segments, cu_seqlens, group.share(modalities).clone()


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
