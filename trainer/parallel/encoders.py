"""Encoders data-parallel inside a tensor group: each rank runs its share of a micro-batch's images and clips.

Tensor ranks hold the same micro-batch and whole encoders. Rank r of n encodes images r N/n .. (r + 1) N/n, rounded up,
and the ranks gather the features, so that all that follows sees what it would see without this. The gradient of an
encoder's weights is then one of a rank's own images; it is summed over the group, all of an encoder's together, once
for each micro-batch that has something for it. A share may be empty.
"""

from torch import Tensor, nn
from torch.func import functional_call

from trainer.parallel.groups import TensorGroup
from trainer.parallel.mappings import copy_all_to, join

ENCODERS = ("0.vision", "0.audio")
"""Their paths. Each takes tensors with a row for each image or clip, and gives one."""


def share_encoders(model: nn.Module, group: TensorGroup) -> None:
    """Let every rank run its share, in place; `model` is whole, or a pipeline's stage. Names stay."""
    for path, part in list(model.named_modules()):
        if path in ENCODERS:
            part.forward = _Share(part, group).run


class _Share(nn.Module):
    """An encoder and its own forward, to call with other tensors for its weights."""

    def __init__(self, encoder: nn.Module, group: TensorGroup) -> None:
        super().__init__()
        self.encoder, self._group, self._forward = encoder, group, encoder.forward

    def run(self, *inputs: Tensor) -> Tensor:
        """Features of all rows, the same on every rank."""
        rows = inputs[0].shape[0]
        if not rows:
            return self.forward(*inputs)
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        copies = dict(zip(trained, copy_all_to([*trained.values()], self._group), strict=True)) if trained else {}
        features: Tensor = functional_call(self, copies, tuple(self._group.share(x) for x in inputs))
        return join(features, rows, self._group)

    def forward(self, *inputs: Tensor) -> Tensor:
        """The encoder's."""
        features: Tensor = self._forward(*inputs)
        return features
