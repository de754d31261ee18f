"""Models with cross-attention whose gates stand open, as those of a trained one do."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from shared.config import load
from tests.support.runs import run_file
from trainer.models import build

OPEN = {"attention_gate": 0.7, "mlp_gate": -0.4}
CROSS = "model.decoder.cross_every=1"


def open_gates(model: nn.Module) -> nn.Module:
    """Set every gate, in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (gate := name.rpartition(".")[2]) in OPEN:
                parameter.fill_(OPEN[gate])
    return model


def open_start(folder: Path, sets: list[str]) -> Path:
    """A new file with the first weights of such a run, but for its gates, to be its `train.init_from`."""
    whole = [each for each in sets if not each.startswith("mesh.")]
    path = folder / f"open-{len(list(folder.glob('open-*')))}.safetensors"
    save_file(open_gates(build.build(load(run_file(folder, "part-{0..0}.tar"), whole), "sdpa")).state_dict(), path)
    return path
