"""torch.compile over transformer blocks, in place: names of parameters and what is saved stay.

A pack has one static length, so the decoder's blocks, which share their code, are compiled once. The encoders' blocks
are compiled for any shape: pictures and clips come in a set of shapes for every group. Blocks with experts run eagerly:
their rows are as many as the router says, other ones in every pack. So does everything under ZeRO-3, whose hooks, at
every layer, would be traced anew for each. The loss is compiled too (see `loss`), and on large weights the adding up of
gradients (see `accumulating`).
"""

import torch
from torch import nn

from shared.sections import TrainSection
from trainer.models.decoder import DecoderBlock
from trainer.models.encoder import EncoderBlock


def compiles(train: TrainSection, device: torch.device) -> bool:
    """Whether `train.compile` asks for it on this device."""
    return device.type == "cuda" if train.compile == "auto" else train.compile


def compile_blocks(model: nn.Module, train: TrainSection, device: torch.device) -> int:
    """Have encoder blocks and decoder blocks with one network compiled at their first call; how many there are."""
    if train.zero_stage == 3 or not compiles(train, device):
        return 0
    blocks = [part for part in model.modules() if isinstance(part, DecoderBlock | EncoderBlock)]
    for block in blocks:
        block.compile(dynamic=isinstance(block, EncoderBlock))
    return len(blocks)
