"""Gated cross-attention: text of a sample attends to the image and the clip of the same sample.

Form (Flamingo: Alayrac et al. 2022, section 3.1; Llama 3.2 Vision): h + tanh(a) attention(norm(h), norm(memory)), then
h + tanh(m) swiglu(norm(h)). Both gates start at 0, so a model that has it and has not trained it gives the logits of
one without. Places of features, and text of samples that have none, pass unchanged whatever the gates.

Shapes: T places of the pack, C the width, H query heads, G key/value heads, D head size. `memory_TC` holds the
projected features at the places where they stand in the pack, so its shape is the pack's, whatever the group, and
`segments_T` and `modalities_T` say who may see what.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shared.model_sections import DecoderSection
from trainer.models.attention import Backend, masked_attention
from trainer.models.gradients import CODES
from trainer.models.initial import init_block


class CrossAttention(nn.Module):
    """What a decoder block does before its own attention, if it was chosen to. Sizes are the block's."""

    def __init__(self, section: DecoderSection, backend: Backend) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.backend = section.heads, section.kv_heads, backend
        wide, narrow = section.heads * section.head_size, section.kv_heads * section.head_size
        self.attention_norm = nn.RMSNorm(section.dim, eps=section.norm_eps)
        self.memory_norm = nn.RMSNorm(section.dim, eps=section.norm_eps)
        self.q = nn.Linear(section.dim, wide, bias=False)
        self.k = nn.Linear(section.dim, narrow, bias=False)
        self.v = nn.Linear(section.dim, narrow, bias=False)
        self.out = nn.Linear(wide, section.dim, bias=False)
        self.attention_gate = nn.Parameter(torch.zeros(1))
        self.mlp_norm = nn.RMSNorm(section.dim, eps=section.norm_eps)
        self.gate = nn.Linear(section.dim, section.mlp, bias=False)
        self.up = nn.Linear(section.dim, section.mlp, bias=False)
        self.down = nn.Linear(section.mlp, section.dim, bias=False)
        self.mlp_gate = nn.Parameter(torch.zeros(1))
        init_block(self, section.depth)

    def forward(self, hidden_TC: Tensor, memory_TC: Tensor, segments_T: Tensor, modalities_T: Tensor) -> Tensor:
        """The new hidden values."""
        visible_TT, sees_T = visibility(segments_T, modalities_T)
        attended = self._attend(self.attention_norm(hidden_TC), self.memory_norm(memory_TC), visible_TT)
        hidden_TC = hidden_TC + torch.tanh(self.attention_gate) * attended.masked_fill(~sees_T[:, None], 0)
        x = self.mlp_norm(hidden_TC)
        fed = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        out: Tensor = hidden_TC + torch.tanh(self.mlp_gate) * fed.masked_fill(~sees_T[:, None], 0)
        return out

    def _attend(self, x_TC: Tensor, memory_TC: Tensor, visible_TT: Tensor) -> Tensor:
        q = self.q(x_TC).unflatten(-1, (self.heads, -1))
        k = self.k(memory_TC).unflatten(-1, (self.kv_heads, -1))
        v = self.v(memory_TC).unflatten(-1, (self.kv_heads, -1))
        mixed = masked_attention(q[None], k[None], v[None], visible_TT[None, None], backend=self.backend)
        out: Tensor = self.out(mixed[0].flatten(1))
        return out


def visibility(segments_T: Tensor, modalities_T: Tensor) -> tuple[Tensor, Tensor]:
    """Which places each place attends to, [T, T], and whether it counts at all, [T].

    A place sees the features of its own segment. One whose segment has none sees itself, so that no row of the softmax
    is empty; it does not count, and neither does a place where a feature stands.
    """
    features_T = modalities_T != CODES["text"]
    visible_TT = (segments_T[:, None] == segments_T[None, :]) & features_T[None, :]
    some_T = visible_TT.any(1)
    visible_TT = visible_TT | torch.diag(~some_T)
    return visible_TT, some_T & ~features_T


def joined(state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A decoder's state as a pipeline sends it on: hidden values and memory, if any, as one [2T, C].

    DeepSpeed goes backward once for each floating tensor that a stage hands on, and needs a gradient for each that it
    got: one tensor makes both right, also where nobody looks at the memory any more.
    """
    hidden, positions, segments, cu_seqlens, modalities, *memory = state
    both = torch.cat([hidden, *memory]) if memory else hidden
    return both, positions, segments, cu_seqlens, modalities


def parted(state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The state that was `joined`."""
    both, positions, *rest = state
    length = positions.shape[0]
    memory = [both[length:]] if len(both) > length else []
    return both[:length], positions, *rest, *memory
