"""What a rank holds of the model and its optimizer: read out for a checkpoint, and filled from one of any layout.

A checkpoint knows whole parameters only. Three places keep them, and `held` finds each: plain tensors with a torch
optimizer (ZeRO-0, and all that is not trained), flat fp32 partitions (ZeRO-1, 2 and bf16), partitioned parameters
(ZeRO-3). What several ranks hold alike, each of them saves an equal share of.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shared.errors import CheckpointError
from shared.mesh import Mesh
from trainer.launch import Ranks
from trainer.models.parts import is_tied_copy
from trainer.shard import Box, Entry, Piece
from trainer.source import Source

WEIGHT = "weight"


class Flat(msgspec.Struct, eq=False):
    """Numbers of a flattened box from `start` on; `tensor` is a flat view of where they live."""

    tensor: Tensor
    start: int


class Cut(NamedTuple):
    """A parameter's dimension `dim` is cut in `ways` equal parts over that many neighbouring ranks of an axis."""

    dim: int
    axis: Literal["data", "tensor"]
    ways: int


class Held(msgspec.Struct, eq=False):
    """A parameter or buffer on this rank, which is copy `copy` of `copies`.

    Attributes:
        box: what this rank computes with, of the whole tensor; sliced by tensor parallelism.
        computed: the numbers it computes with. master: those that the optimizer steps (the same ones where it keeps no
            fp32 copy), maybe fewer, maybe none.
        stepped: the optimizer's tensor of which `master` is the part from `at` on; None for what is not trained.
    """

    name: str
    box: Box
    copy: int
    copies: int
    computed: Flat
    master: Flat
    stepped: Tensor | None = None
    at: int = 0

    def moments(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Flat views of the optimizer's tensors for `master`, by its own names."""
        if self.stepped is None:
            return {}
        state, shape = optimizer.state.get(self.stepped, {}), self.stepped.shape
        return {key: self.part(x) for key, x in state.items() if isinstance(x, Tensor) and x.shape == shape}

    def part(self, x: Tensor) -> Tensor:
        """The part for `master` of a tensor laid out as `stepped` is."""
        return x.view(-1)[self.at : self.at + self.master.tensor.numel()]

    def updates(self, optimizer: Optimizer) -> int | None:
        """Steps made, if the optimizer counts them."""
        step = optimizer.state.get(self.stepped, {}).get("step") if self.stepped is not None else None
        return None if step is None else int(step)


def held(module: nn.Module, optimizer: Any, ranks: Ranks) -> Iterator[Held]:
    """Everything of a module under DeepSpeed that belongs into a checkpoint; a tied parameter once.

    What is not in a layer (`<number>.<name>`) is no part of the model; a tied head's copy is the embedding's stage's.
    """
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in seen or is_tied_copy(tensor) or not name.partition(".")[0].isdigit():
            continue
        seen.add(id(tensor))
        if hasattr(tensor, "ds_id"):
            yield _partitioned(name, tensor, optimizer, ranks)
        elif hasattr(tensor, "_hp_mapping"):
            yield _flattened(name, tensor, optimizer, ranks)
        else:
            flat = Flat(tensor.data.view(-1), 0)
            stepped = tensor if tensor.requires_grad else None
            yield Held(name, *place(name, tensor.shape, ranks, False), flat, flat, stepped)


def place(name: str, shape: torch.Size, ranks: Ranks, exclusive: bool) -> tuple[Box, int, int]:
    """The box that a rank's tensor of `shape` is, this rank's number among those that save it, and their number.

    `exclusive`: the data-parallel ranks that hold the same box each keep another part of it.
    """
    whole, offsets = [*shape], [0] * len(shape)
    ways = {"data": 1, "tensor": 1}
    for cut in cuts(name, ranks.mesh):
        ways[cut.axis] = cut.ways
        whole[cut.dim] = shape[cut.dim] * cut.ways
        offsets[cut.dim] = shape[cut.dim] * (getattr(ranks.coords, cut.axis) % cut.ways)
    copy, copies = 0, 1
    for axis in ("tensor",) if exclusive else ("data", "tensor"):
        copy = copy * (getattr(ranks.mesh, axis) // ways[axis]) + getattr(ranks.coords, axis) // ways[axis]
        copies *= getattr(ranks.mesh, axis) // ways[axis]
    return Box(tuple(whole), tuple(offsets), tuple(shape)), copy, copies


def cuts(name: str, mesh: Mesh) -> list[Cut]:
    """How a parameter is cut over ranks."""
    found: list[Cut] = []
    if mesh.expert > 1:
        from trainer.parallel import expert

        if (dim := expert.cut_dim(name)) is not None:
            found.append(Cut(dim, "data", mesh.expert))
    if mesh.tensor > 1:
        from trainer.parallel import tensor

        if (dim := tensor.cut_dim(name)) is not None:
            found.append(Cut(dim, "tensor", mesh.tensor))
    return found


def entries(parts: Iterable[Held], optimizer: Optimizer) -> dict[str, Entry]:
    """What this rank saves: key -> its share, as views of the live tensors."""
    found: dict[str, Entry] = {}
    for part in parts:
        low, high = (part.master.tensor.numel() * copy // part.copies for copy in (part.copy, part.copy + 1))
        if low == high:
            continue
        piece = Piece(part.box, part.master.start + low, high - low, part.updates(optimizer))
        for kind, flat in {WEIGHT: part.master.tensor, **part.moments(optimizer)}.items():
            found[f"{kind}/{part.name}"] = Entry(flat[low:high], piece)
    return found


@torch.no_grad()
def fill(parts: Iterable[Held], optimizer: Optimizer, source: Source) -> None:
    """Give every part its numbers, and the optimizer its moments and counts.

    Raises:
        CheckpointError: the checkpoint lacks something, or parameters stepped together have different ages.
    """
    ages: dict[int, int | None] = {}
    for part in parts:
        key = f"{WEIGHT}/{part.name}"
        for flat in (part.computed, part.master):
            flat.tensor.copy_(source.read(key, part.box, flat.start, flat.tensor.numel()))
        if part.stepped is None or not part.master.tensor.numel():
            continue
        age = source.updates(part.name)
        if ages.setdefault(id(part.stepped), age) != age:
            raise CheckpointError(f"{part.name} was stepped {age} times, others of its group {ages[id(part.stepped)]}")
        _fill_moments(part, optimizer, source, age)


def _fill_moments(part: Held, optimizer: Optimizer, source: Source, age: int | None) -> None:
    assert part.stepped is not None
    state = optimizer.state[part.stepped]
    for kind in source.kinds(part.name):
        if kind != WEIGHT:
            whole = state.setdefault(kind, torch.zeros_like(part.stepped))
            flat = part.master
            part.part(whole).copy_(source.read(f"{kind}/{part.name}", part.box, flat.start, flat.tensor.numel()))
    if age is not None:
        on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
        state["step"] = torch.tensor(float(age), device=part.stepped.device if on_device else "cpu")


def _flattened(name: str, parameter: Any, optimizer: Any, ranks: Ranks) -> Held:
    """ZeRO-1, ZeRO-2 and bf16: DeepSpeed links a parameter to its part of this rank's flat fp32 partition, if any."""
    link = parameter._hp_mapping
    computed = Flat(parameter.data.view(-1), 0)
    where = place(name, parameter.shape, ranks, True)
    if link is None:
        return Held(name, *where, computed, Flat(computed.tensor[:0], 0))
    stepped = optimizer.optimizer.param_groups[link.param_group_index]["params"][0]
    master = Flat(link.hp_fragment.data, link.lp_fragment_address.start)
    return Held(name, *where, computed, master, stepped, link.hp_fragment_address.start)


def _partitioned(name: str, parameter: Any, optimizer: Any, ranks: Ranks) -> Held:
    """ZeRO-3: each data-parallel rank has an equal part of every parameter, the last ones padded."""
    size = parameter.ds_tensor.ds_numel
    start = min(ranks.coords.data * size, parameter.ds_numel)
    count = min(size, parameter.ds_numel - start)
    computed = Flat(parameter.ds_tensor.data.view(-1)[:count], start)
    where = place(name, parameter.ds_shape, ranks, True)
    if not parameter.requires_grad:
        return Held(name, *where, computed, computed)
    group, at, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    stepped = optimizer.fp32_partitioned_groups_flat[group]
    return Held(name, *where, computed, Flat(stepped.data[at : at + count], start), stepped, at)
