"""Whole fp32 weights out of a checkpoint, from DeepSpeed's files but without DeepSpeed.

Files of a checkpoint: `mp_rank_XX_model_states.pt` of each pipeline stage (weights as computed with, and the order of
its parameters), `*zero_pp_rank_D_mp_rank_XX_optim_states.pt` of each data-parallel rank D (its slice of every
parameter group's fp32 master weights). A group's slices laid end to end are its parameters in order, then padding.
They are pickles: only tensors and plain values are read (`weights_only`), and DeepSpeed's own objects in them, none of
which is needed, become `Unread`.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from shared.errors import CheckpointError
from shared.sections import RunConfig
from trainer.manifest import check_signature, signature_of, verify
from trainer.models import build


class Unread:
    """Stands for an object of DeepSpeed's, whatever it was made of."""

    def __init__(self, *parts: object) -> None: ...


def read_checkpoint(config: RunConfig, folder: Path) -> dict[str, Tensor]:
    """Every weight of the model by name, fp32: the optimizer's master weights where there are any.

    Raises:
        CheckpointError: the checkpoint is damaged, not of this run file, or of a layout that is not whole in its files.
    """
    manifest = verify(folder)
    saved = manifest.signature
    asked = msgspec.structs.replace(signature_of(config), data=saved.data, training=saved.training)
    check_signature(folder.name, saved, asked)
    mesh, stage = config.mesh, config.train.zero_stage
    if mesh.tensor > 1 or mesh.expert > 1 or stage > 2 or (mesh.pipe > 1 and stage == 0):
        text = f"{folder.name} cannot be exported: its layout is {saved.layout}"
        raise CheckpointError(f"{text}; tensor 1, expert 1 and ZeRO 1 or 2 can (or 0 with pipe 1)")
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("mp_rank_*_model_states.pt")):
        states = _load(path)
        found |= {name: tensor.float() for name, tensor in _module(folder, states).items()}
        if stage:
            found |= dict(_masters(folder, states["param_shapes"], path.name.split("_")[2]))
    return {name: found[name] for name in build.shapes(config)}


def _module(folder: Path, states: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """The weights computed with; a pipeline has them in a file for each layer."""
    if isinstance(states["module"], Mapping):
        return states["module"]
    layers = [
        (int(path.name.split("_")[1].split("-")[0]), path) for path in sorted(folder.glob("layer_*-model_states.pt"))
    ]
    return {f"{place}.{name}": tensor for place, path in layers for name, tensor in _load(path).items()}


def _masters(folder: Path, groups: list[Mapping[str, torch.Size]], rank: str) -> Iterator[tuple[str, Tensor]]:
    paths = sorted(folder.glob(f"*zero_pp_rank_*_mp_rank_{rank}_optim_states.pt"), key=_data_rank)
    slices = [_load(path)["optimizer_state_dict"]["single_partition_of_fp32_groups"] for path in paths]
    for shapes, *parts in zip(groups, *slices, strict=True):
        flat, start = torch.cat([part.detach() for part in parts]), 0
        for name, shape in shapes.items():
            yield name, flat[start : start + shape.numel()].view(shape).clone()
            start += shape.numel()


def _data_rank(path: Path) -> int:
    return int(re.findall(r"pp_rank_(\d+)_", path.name)[0])


def _load(path: Path) -> dict[str, Any]:
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    with torch.serialization.safe_globals([(Unread, name) for name in names if name.startswith("deepspeed.")]):
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return found
