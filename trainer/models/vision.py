"""Vision transformer over one image bucket.

Shapes: N images, h x w patches each, P values of a patch, C the width. A learned grid of G x G positions is resampled
to h x w, so one model serves every bucket. Neighbouring merge x merge patches leave as one token. A class token, where
the form has one, takes part in every block and does not leave.
"""

import torch
from torch import Tensor, nn

from shared.model_sections import VisionSection
from trainer.models.attention import Backend
from trainer.models.encoder import EncoderBlock, init_encoder


class VisionTower(nn.Module):
    """[N, h, w, P] patches -> [N, h/merge * w/merge, merge * merge * C] tokens, rows first."""

    def __init__(self, section: VisionSection, patch_values: int, merge: int, backend: Backend) -> None:
        super().__init__()
        self.merge = merge
        self.patch = nn.Linear(patch_values, section.dim, bias=section.patch_bias)
        self.positions_GGC = nn.Parameter(torch.empty(section.grid, section.grid, section.dim))
        self.pre_norm = nn.LayerNorm(section.dim, section.norm_eps) if section.pre_norm else nn.Identity()
        self.blocks = nn.ModuleList(
            EncoderBlock(section.dim, section.heads, section.mlp, backend, section.activation, section.norm_eps)
            for _ in range(section.depth)
        )
        self.norm = nn.LayerNorm(section.dim, section.norm_eps)
        init_encoder(self)
        nn.init.normal_(self.positions_GGC, std=0.02)
        self.class_C, self.positions_class_C = self._class_token(section)

    def forward(self, patches_NhwP: Tensor) -> Tensor:
        """Tokens of every image; zero images give zero tokens and zero gradients, never none."""
        height, width = patches_NhwP.shape[1:3]
        x = self.patch(patches_NhwP) + resample(self.positions_GGC, height, width)
        x = self.pre_norm(self._with_class(x.flatten(1, 2)))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)[:, 0 if self.class_C is None else 1 :]
        return merge_patches(x.unflatten(1, (height, width)), self.merge)

    def _with_class(self, x_NLC: Tensor) -> Tensor:
        if self.class_C is None or self.positions_class_C is None:
            return x_NLC
        first = (self.class_C + self.positions_class_C).expand(x_NLC.shape[0], 1, -1)
        return torch.cat([first, x_NLC], dim=1)

    @staticmethod
    def _class_token(section: VisionSection) -> tuple[nn.Parameter | None, nn.Parameter | None]:
        if not section.class_token:
            return None, None
        return nn.Parameter(0.02 * torch.randn(section.dim)), nn.Parameter(0.02 * torch.randn(section.dim))


def resample(grid_GGC: Tensor, height: int, width: int) -> Tensor:
    """[G, G, C] -> [height, width, C], as bilinear interpolation with `align_corners=False`."""
    rows = interpolation(height, grid_GGC.shape[0], grid_GGC)
    columns = interpolation(width, grid_GGC.shape[1], grid_GGC)
    return torch.einsum("hg,wk,gkc->hwc", rows, columns, grid_GGC)


def interpolation(places: int, knots: int, like: Tensor) -> Tensor:
    """[places, knots] weights of linear interpolation between pixel centres, clamped at the edges."""
    at = (torch.arange(places, device=like.device) + 0.5) * knots / max(places, 1) - 0.5
    apart = at.clamp(0, knots - 1)[:, None] - torch.arange(knots, device=like.device)
    return (1 - apart.abs()).clamp(min=0).to(like.dtype)


def merge_patches(x_NhwC: Tensor, merge: int) -> Tensor:
    """[N, h, w, C] -> [N, h/merge * w/merge, merge * merge * C]: each square of patches side by side in one token."""
    n, height, width, wide = x_NhwC.shape
    x = x_NhwC.reshape(n, height // merge, merge, width // merge, merge, wide)
    return x.transpose(2, 3).reshape(n, (height // merge) * (width // merge), merge * merge * wide)
