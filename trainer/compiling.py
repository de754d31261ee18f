"""torch.compile over the blocks of decoder and encoders, in place: names of parameters and what is saved stay.

Blocks of one kind share their code, so each kind is compiled once for each set of shapes. A pack has one static
length; pictures and clips come in many numbers and sizes, so the encoders' sizes are symbols.
"""

import torch
from torch import nn

from shared.sections import TrainSection
from trainer.models.decoder import DecoderBlock
from trainer.models.encoder import EncoderBlock

DYNAMIC: dict[type[nn.Module], bool] = {DecoderBlock: False, EncoderBlock: True}
SHAPES_LIMIT = 64


def compiles(train: TrainSection, device: torch.device) -> bool:
    """Whether `train.compile` asks for it on this device."""
    return device.type == "cuda" if train.compile == "auto" else train.compile


def compile_blocks(model: nn.Module) -> int:
    """Compile every block of the model, at its first call; how many there are."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES_LIMIT)
    blocks = [part for part in model.modules() if type(part) in DYNAMIC]
    for block in blocks:
        block.compile(dynamic=DYNAMIC[type(block)])
    return len(blocks)
