"""What the two encoders share: a pre-norm transformer block (LayerNorm, attention, GELU) and a projector."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from shared.model_sections import Activation
from trainer.models.attention import Backend, attention


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), the approximation of GELU that OpenAI's CLIP was trained with."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": nn.functional.gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
}


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), over [B, L, dim], bidirectional.

    Without `key_bias` the middle third of qkv's bias gets no gradient: it starts at zero and stays there. (A key bias
    adds the same to all scores of a query, so it never changes what attention gives.)
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        mlp: int,
        backend: Backend,
        activation: Activation = "gelu",
        norm_eps: float = 1e-5,
        key_bias: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.backend = heads, backend
        self.activate = ACTIVATIONS[activation]
        self.attention_norm = nn.LayerNorm(dim, norm_eps)
        self.qkv = nn.Linear(dim, 3 * dim)
        if not key_bias:
            self.qkv.bias.register_hook(without_key)  # type: ignore[no-untyped-call]
        self.out = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim, norm_eps)
        self.up = nn.Linear(dim, mlp)
        self.down = nn.Linear(mlp, dim)

    def forward(self, x_BLC: Tensor, segments_BL: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """The same shape. See `attention` for segments and cu_seqlens."""
        qkv = self.qkv(self.attention_norm(x_BLC)).unflatten(-1, (3, self.heads, -1))
        mixed = attention(
            *qkv.unbind(2), causal=False, backend=self.backend, segments_BL=segments_BL, cu_seqlens=cu_seqlens
        )
        x_BLC = x_BLC + self.out(mixed.flatten(2))
        out: Tensor = x_BLC + self.down(self.activate(self.up(self.mlp_norm(x_BLC))))
        return out


def without_key(bias_gradient: Tensor) -> Tensor:
    """[3 C] gradient of a query, key and value bias with the key's part zeroed."""
    query, key, value = bias_gradient.chunk(3)
    return torch.cat([query, torch.zeros_like(key), value])


class Projector(nn.Module):
    """Two-layer GELU network from an encoder's width to the decoder's."""

    def __init__(self, wide: int, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(wide, dim)
        self.down = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[..., wide] -> [..., dim]."""
        out: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return out


def init_encoder(module: nn.Module) -> None:
    """Normal weights of deviation 0.02, zero biases; norms stay the identity."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv1d):
            nn.init.normal_(part.weight, std=0.02)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def alternating_bounds(lengths_B: Tensor, length: int) -> Tensor:
    """Segment bounds of B rows of `length` places, of which the first lengths_B are real: [2B + 1] int32.

    Real and padding parts alternate: 0, n0, L, L + n1, 2L, ...
    """
    starts = torch.arange(lengths_B.shape[0] + 1, device=lengths_B.device, dtype=torch.int32) * length
    inner = torch.stack([starts[:-1], starts[:-1] + lengths_B.to(torch.int32)], dim=1)
    return torch.cat([inner.flatten(), starts[-1:]])
