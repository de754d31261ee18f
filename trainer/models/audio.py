"""Audio encoder of Whisper's form (Radford et al. 2022) over log-mel frames.

Shapes: M clips, F frames, mels bins, L = F / 2 places after the strided stem, C the width. Frames beyond a clip's
true length neither give nor take attention. `stack` neighbouring places leave as one token.
"""

import math

import torch
from torch import Tensor, nn

from shared.model_sections import AudioEncoderSection
from trainer.models.attention import Backend
from trainer.models.encoder import EncoderBlock, alternating_bounds, init_encoder


class AudioTower(nn.Module):
    """[M, mels, F] log-mel frames and their true number -> [M, F / 2 / stack, stack * C] tokens."""

    positions_LC: Tensor | None

    def __init__(self, section: AudioEncoderSection, stack: int, backend: Backend) -> None:
        super().__init__()
        self.stack, self.backend = stack, backend
        self.stem = nn.Conv1d(section.mels, section.dim, 3, padding=1)
        self.stride = nn.Conv1d(section.dim, section.dim, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            EncoderBlock(
                section.dim, section.heads, section.mlp, backend, section.activation, key_bias=section.key_bias
            )
            for _ in range(section.depth)
        )
        self.register_buffer("positions_LC", self._table(section))
        self.norm = nn.LayerNorm(section.dim)
        init_encoder(self)

    def forward(self, mels_MmF: Tensor, lengths_M: Tensor) -> Tensor:
        """Tokens of every clip; zero clips give zero tokens and zero gradients, never none."""
        if not mels_MmF.shape[2]:
            mels_MmF = mels_MmF.new_zeros(0, self.stem.in_channels, 2 * self.stack)
        x = nn.functional.gelu(self.stem(mels_MmF))
        x = nn.functional.gelu(self.stride(x)).transpose(1, 2)
        x = x + self._positions(x)
        segments_ML, cu_seqlens = self._segments((lengths_M + 1) // 2, x.shape[1])
        for block in self.blocks:
            x = block(x, segments_ML, cu_seqlens)
        tokens: Tensor = self.norm(x).reshape(x.shape[0], x.shape[1] // self.stack, self.stack * x.shape[2])
        return tokens

    def _positions(self, x_MLC: Tensor) -> Tensor:
        table: Tensor | None = self.positions_LC
        return sinusoids(x_MLC.shape[1], x_MLC.shape[2], x_MLC) if table is None else table[: x_MLC.shape[1]].to(x_MLC)

    @staticmethod
    def _table(section: AudioEncoderSection) -> Tensor | None:
        wanted = section.positions == "table"
        return sinusoids(section.places, section.dim, torch.empty(0)) if wanted else None

    def _segments(self, places_M: Tensor, length: int) -> tuple[Tensor, Tensor]:
        at = torch.arange(length, device=places_M.device)
        return (at < places_M[:, None]).to(torch.int32), alternating_bounds(places_M, length)


def sinusoids(length: int, channels: int, like: Tensor) -> Tensor:
    """[length, channels] Whisper's positions: sines, then cosines, wavelengths from 2 pi to 20,000 pi."""
    half = channels // 2
    scales = torch.exp(-math.log(10_000) / max(half - 1, 1) * torch.arange(half, device=like.device))
    angles = torch.arange(length, device=like.device)[:, None] * scales
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(like.dtype)
