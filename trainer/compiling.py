"""torch.compile over the decoder's blocks, in place: names of parameters and what is saved stay.

A pack has one static length, so the blocks, which share their code, are compiled once. The encoders run eagerly:
pictures and clips come in a set of shapes for every group, and each would have to be compiled. So do blocks with
experts, whose rows are as many as the router says, other ones in every pack. Of the encoders only CLIP's activation is
compiled, for any shape: as three kernels it would keep two copies of the widest tensor. The loss is too (see `loss`).
"""

import torch
from torch import nn

from shared.sections import TrainSection
from trainer.models.decoder import DecoderBlock
from trainer.models.encoder import EncoderBlock, quick_gelu


def compiles(train: TrainSection, device: torch.device) -> bool:
    """Whether `train.compile` asks for it on this device."""
    return device.type == "cuda" if train.compile == "auto" else train.compile


def compile_blocks(model: nn.Module) -> int:
    """Compile every decoder block with one network, at its first call; how many there are."""
    blocks = [part for part in model.modules() if isinstance(part, DecoderBlock)]
    for block in blocks:
        block.compile(dynamic=False)
    for part in model.modules():
        if isinstance(part, EncoderBlock) and part.activate is quick_gelu:
            part.activate = torch.compile(quick_gelu, dynamic=True)
    return len(blocks)
