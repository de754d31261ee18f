"""How long each layer takes on this machine, forward and backward: what `mesh.balance: measured` cuts a pipeline by.

Layers are built one at a time as they will train (cut, frozen, recomputed, compiled, in the run's dtype) and run on one
made-up pack of the group with the most image and clip tokens, each on the output of the one before. Layers that are
alike are measured once, so that a decoder's blocks are equally heavy whatever else the machine does.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shared.batch import batch_spec, groups
from shared.sections import RunConfig
from trainer.launch import Ranks
from trainer.loss import WHOLE, Vocabulary, token_loss
from trainer.memory.recompute import recomputed_modules
from trainer.models.build import Layer
from trainer.preprocess import Tensors, Transform

WARM_UPS, RUNS = 2, 5

Prepare = Callable[[nn.Module], None]
"""Does to layers, named by their places, what is done to the model before it trains."""


def layer_times_ns(
    config: RunConfig, ranks: Ranks, layers: Sequence[Layer], prepare: Prepare, vocabulary: Vocabulary = WHOLE
) -> list[int]:
    """Nanoseconds of each layer, the mean over all ranks, which call it together: the fastest of `RUNS` on each."""
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    pack = full_pack(config, ranks.device, dtype)
    state: tuple[Tensor, ...] = (pack.tokens_T, *pack[2:])
    recomputed = set(recomputed_modules(config))
    known: list[tuple[Layer, bool, int]] = []
    found = []
    for place, layer in enumerate(layers):
        again = str(place) in recomputed
        ns = next((ns for each, flag, ns in known if (each, flag) == (layer, again)), None)
        if ns is None:
            ns, state = _measure(_built(layer, place, prepare, ranks.device, dtype), state, pack, vocabulary)
            known.append((layer, again, ns))
        found.append(ns)
    return [total // ranks.mesh.world for total in ranks.sum(found)]


def full_pack(config: RunConfig, device: torch.device, dtype: torch.dtype) -> Tensors:
    """A pack without room left, of the group with the most image and clip tokens; pixels and sound are zeros."""
    group = max(groups(config.data), key=lambda each: each.image_tokens + each.clip_tokens)
    kinds = {"int32": torch.int32, "int16": torch.int16, "uint8": torch.uint8}
    fields = {f.name: torch.zeros(f.shape, dtype=kinds[f.dtype]) for f in batch_spec(group).fields}
    length, places = group.tokens // group.samples, torch.arange(group.tokens)
    sample = (places // length).clamp(max=group.samples - 1)
    within = places - sample * length
    images, clips, heard = group.image_tokens, group.clip_tokens, within - group.image_tokens
    rows = torch.where(heard < 0, sample * images + within, group.images * images + sample * clips + heard)
    fields["positions_T"], fields["segments_T"] = within, sample + 1
    fields["features_T"] = rows.masked_fill(heard >= clips, -1)
    fields["cu_seqlens"] = (torch.arange(group.samples + 2) * length).clamp(max=group.tokens).int()
    fields["cu_seqlens"][group.samples :] = group.tokens
    fields["clip_lengths_M"].fill_(group.clip_samples)
    return Transform(config.data, config.model, device, dtype)({name: x.to(device) for name, x in fields.items()})


def _built(layer: Layer, place: int, prepare: Prepare, device: torch.device, dtype: torch.dtype) -> nn.Module:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        part = nn.ModuleDict({str(place): layer.build().to(device)})
    prepare(part)
    return part.to(dtype)[str(place)]


def _measure(
    layer: nn.Module, state: tuple[Tensor, ...], pack: Tensors, vocabulary: Vocabulary
) -> tuple[int, tuple[Tensor, ...]]:
    """Its time, and its output (none of the head, which is last)."""
    times: list[int] = []
    out: tuple[Tensor, ...] | Tensor = ()
    one = torch.ones((), device=pack.tokens_T.device)
    for _ in range(WARM_UPS + RUNS):
        inputs = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in state)
        began = _now_ns(pack.tokens_T.device)
        out = layer(inputs)
        loss = out[0] if isinstance(out, tuple) else token_loss(out, pack.labels_T, one, vocabulary)
        if loss.requires_grad:
            torch.autograd.backward(loss, torch.ones_like(loss))
        times.append(_now_ns(pack.tokens_T.device) - began)
    return min(times[WARM_UPS:]), tuple(x.detach() for x in out) if isinstance(out, tuple) else ()


def _now_ns(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns()
