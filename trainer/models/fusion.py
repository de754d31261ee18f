"""The first layer: encoders, projectors and token embedding, merged into one pack.

Shapes: T places of the pack, C the decoder's width, N images, M clips, R = rows of [image tokens; clip tokens].
`features_T` names for each place the row that stands there, or -1 for a text token.
"""

import torch
from torch import Tensor, nn

from shared.batch import groups
from shared.model_sections import ModelSection
from shared.sections import DataSection
from trainer.models.attention import Backend
from trainer.models.audio import AudioTower
from trainer.models.decoder import State
from trainer.models.encoder import Projector, init_encoder
from trainer.models.gradients import modalities, stop_gradient
from trainer.models.vision import VisionTower

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""tokens_T, positions_T, segments_T, features_T, cu_seqlens, patches_NhwP, mels_MmF, mel_lengths_M."""


class Encode(nn.Module):
    """`Inputs` of one micro-batch -> the decoder's `State`.

    Every parameter gets a gradient from every micro-batch: zeros where a modality is absent. `cu_seqlens` leaves with
    one static length, whatever the group, as a pipeline's buffers need.
    """

    def __init__(self, model: ModelSection, data: DataSection, backend: Backend) -> None:
        super().__init__()
        image, audio, dim = data.image, data.audio, model.decoder.dim
        stack = audio.samples_per_token // (2 * model.audio.hop)
        self.bounds = max(group.samples for group in groups(data)) + 2
        self.embedding = nn.Embedding(model.decoder.vocab, dim)
        self.vision = VisionTower(model.vision, 3 * image.patch**2, image.merge, backend)
        self.vision_projector = Projector(model.vision.dim * image.merge**2, dim)
        self.audio = AudioTower(model.audio, stack, backend)
        self.audio_projector = Projector(model.audio.dim * stack, dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        init_encoder(self.vision_projector)
        init_encoder(self.audio_projector)
        self.remembers = bool(model.decoder.cross_blocks)
        self.detach = model.detach
        for name in self.detach:
            without_decay(getattr(self, name))

    def forward(self, inputs: Inputs) -> State:
        """Floating inputs are cast to the weights' dtype; gradients stop at them."""
        tokens, positions, segments, features, cu_seqlens, patches, mels, mel_lengths = inputs
        dtype = self.embedding.weight.dtype
        seen = self.vision(patches.detach().to(dtype))
        heard = self.audio(mels.detach().to(dtype), mel_lengths)
        image = self.vision_projector(stop_gradient(seen) if "vision" in self.detach else seen)
        clip = self.audio_projector(stop_gradient(heard) if "audio" in self.detach else heard)
        rows = torch.cat([image.flatten(0, 1), clip.flatten(0, 1)])
        hidden, memory = merge_features(self.embedding(tokens), rows, features)
        cu_seqlens = nn.functional.pad(cu_seqlens, (0, self.bounds - cu_seqlens.shape[0]), value=tokens.shape[0])
        kinds = modalities(features, image.shape[0] * image.shape[1])
        state = hidden, positions, segments, cu_seqlens, kinds
        return (*state, memory) if self.remembers else state


def without_decay(module: nn.Module) -> None:
    """Mark every parameter as one that weight decay leaves alone."""
    for parameter in module.parameters():
        parameter.without_decay = True  # type: ignore[attr-defined]


def merge_features(embedded_TC: Tensor, rows_RC: Tensor, features_T: Tensor) -> tuple[Tensor, Tensor]:
    """Two [T, C] with `rows_RC[features_T]` where features_T >= 0: the embedding elsewhere, and zeros elsewhere.

    Each row stands in one place only, so the gather's backward adds nothing twice and is deterministic.
    """
    padded = torch.cat([rows_RC.new_zeros(1, rows_RC.shape[1]), rows_RC])
    gathered = padded.index_select(0, features_T + 1)
    return torch.where(features_T[:, None] >= 0, gathered, embedded_TC), gathered
