"""Decoder of Llama's form over one pack: RMSNorm, rotary positions, grouped-query attention, SwiGLU; Qwen2's biases.

Shapes: T places of the pack, C the width, H query heads, G key/value heads, D head size, V vocabulary.
A layer takes and returns `State`, so that a pipeline can cut between any two.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from shared.model_sections import DecoderSection
from trainer.models.attention import Backend, attention
from trainer.models.cross import CrossAttention
from trainer.models.initial import init_block

State = tuple[Tensor, ...]
"""hidden_TC (float), positions_T, segments_T, cu_seqlens, modalities_T (int32), and where blocks attend to features
memory_TC (float, see `cross`); the floating ones carry a gradient."""


class AttentionBlock(nn.Module, ABC):
    """hidden + attention(norm(hidden)), then + feed_forward(hidden), which subclasses say.

    Cross-attention, if any, comes before both. Subclasses end their construction with `finish`.
    """

    def __init__(self, section: DecoderSection, backend: Backend, places: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.backend = section.heads, section.kv_heads, backend
        head, bias = section.head_size, section.qkv_bias
        self.rotary = Rotary(places, head, section.rope_theta)
        self.attention_norm = nn.RMSNorm(section.dim, eps=section.norm_eps)
        self.q = nn.Linear(section.dim, section.heads * head, bias=bias)
        self.k = nn.Linear(section.dim, section.kv_heads * head, bias=bias)
        self.v = nn.Linear(section.dim, section.kv_heads * head, bias=bias)
        self.out = nn.Linear(section.heads * head, section.dim, bias=False)
        self.cross: CrossAttention | None = None

    def finish(self, section: DecoderSection, crosses: bool) -> None:
        """Draw the weights, then make the cross-attention: a block has the same weights with and without it."""
        init_block(self, section.depth)
        self.cross = CrossAttention(section, self.backend) if crosses else None

    def forward(self, state: State) -> State:
        """The state with new hidden values."""
        hidden, positions, segments, cu_seqlens, modalities, *memory = state
        if self.cross is not None:
            hidden = self.cross(hidden, *memory, segments, modalities)
        hidden = hidden + self._attend(self.attention_norm(hidden), positions, segments, cu_seqlens)
        hidden = hidden + self.feed_forward(hidden, segments)
        return hidden, positions, segments, cu_seqlens, modalities, *memory

    @abstractmethod
    def feed_forward(self, hidden_TC: Tensor, segments_T: Tensor) -> Tensor:
        """[T, C] to add to the hidden values."""

    def _attend(self, x_TC: Tensor, positions_T: Tensor, segments_T: Tensor, cu_seqlens: Tensor) -> Tensor:
        q = self.q(x_TC).unflatten(-1, (self.heads, -1))
        k = self.k(x_TC).unflatten(-1, (self.kv_heads, -1))
        v = self.v(x_TC).unflatten(-1, (self.kv_heads, -1))
        cos, sin = self.rotary(positions_T)
        mixed = attention(
            rotate(q, cos, sin)[None],
            rotate(k, cos, sin)[None],
            v[None],
            causal=True,
            backend=self.backend,
            segments_BL=segments_T[None],
            cu_seqlens=cu_seqlens,
        )
        out: Tensor = self.out(mixed[0].flatten(1))
        return out


class DecoderBlock(AttentionBlock):
    """A block with one SwiGLU network."""

    def __init__(self, section: DecoderSection, backend: Backend, places: int, crosses: bool = False) -> None:
        super().__init__(section, backend, places)
        self.mlp_norm = nn.RMSNorm(section.dim, eps=section.norm_eps)
        self.gate = nn.Linear(section.dim, section.mlp, bias=False)
        self.up = nn.Linear(section.dim, section.mlp, bias=False)
        self.down = nn.Linear(section.mlp, section.dim, bias=False)
        self.finish(section, crosses)

    def feed_forward(self, hidden_TC: Tensor, segments_T: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x)) of x = norm(hidden)."""
        x = self.mlp_norm(hidden_TC)
        out: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


class Head(nn.Module):
    """State -> logits [T, V]: RMSNorm and a projection (`build.tie` may give it the embedding's weight)."""

    def __init__(self, section: DecoderSection) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(section.dim, eps=section.norm_eps)
        self.vocabulary = nn.Linear(section.dim, section.vocab, bias=False)
        nn.init.normal_(self.vocabulary.weight, std=0.02)

    def forward(self, state: State) -> Tensor:
        """Logits in the weights' dtype."""
        logits: Tensor = self.vocabulary(self.norm(state[0]))
        return logits


class Rotary(nn.Module):
    """Positions below `places` -> cos and sin [T, 1, head / 2] in fp32 of the rotary angles (Su et al. 2021).

    Looked up: worked out for every head and layer anew, angles took a compiled block three times as long as its memory.
    """

    bits_P21D: Tensor

    def __init__(self, places: int, head: int, theta: float) -> None:
        super().__init__()
        angles = torch.arange(places)[:, None].float() * theta ** (-torch.arange(0, head, 2) / head)
        table = torch.stack([angles.cos(), angles.sin()], dim=1)[:, :, None]
        self.register_buffer("bits_P21D", table.view(torch.int32), persistent=False)  # no cast to bf16 changes integers

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """The table's rows."""
        cos, sin = self.bits_P21D[positions_T].view(torch.float32).unbind(1)
        return cos, sin


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) by its place's angle; Llama's pairing."""
    a, b = x_THD.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_THD.dtype)
