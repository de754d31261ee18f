"""The model section of a run file: its parts, sizes, and where gradients stop. See `sections`."""

from typing import Literal

import msgspec

from shared.section import Above, Amount, Count, Degree, Positive, Seconds, Section

Activation = Literal["gelu", "gelu_tanh", "quick_gelu"]
"""Exact GELU, its tanh approximation, or x * sigmoid(1.702 x)."""


class VisionSection(Section, frozen=True):
    """Vision transformer. `grid` is the side of the learned position grid, resampled to each bucket.

    CLIP's form: class_token and pre_norm (a norm before the first block) on, patch_bias off. SigLIP's: pixels half.
    `pixels` names the per-channel normalisation: CLIP's constants, or mean and deviation 0.5.
    """

    dim: Positive = 128
    depth: Degree = 3
    heads: Degree = 4
    mlp: Positive = 512
    grid: Degree = 8
    class_token: bool = False
    pre_norm: bool = False
    patch_bias: bool = True
    activation: Activation = "gelu"
    norm_eps: Above = 1e-5
    pixels: Literal["clip", "half"] = "clip"


class AudioEncoderSection(Section, frozen=True):
    """Whisper-form audio encoder over `mels` log-mel bins; `stack` frames after the strided stem make a token.

    Whisper's own weights: positions table (`places` stored rows, never trained) and key_bias off.
    """

    dim: Positive = 128
    depth: Degree = 3
    heads: Degree = 4
    mlp: Positive = 512
    mels: Degree = 80
    n_fft: Degree = 400
    hop: Degree = 160
    max_s: Seconds = 30.0
    positions: Literal["sinusoid", "table"] = "sinusoid"
    places: Positive = 1500
    key_bias: bool = True
    activation: Activation = "gelu"


class DecoderSection(Section, frozen=True):
    """Llama-form decoder: grouped-query attention, rotary positions, SwiGLU, RMSNorm.

    Qwen2's form: qkv_bias on. `tied`: the head shares the embedding's weight. `head_dim` 0 means dim / heads.

    With `experts`, every `expert_every`-th block has that many SwiGLU networks of inner width `expert_mlp` (0: mlp)
    instead of one, and a router that sends each token to `experts_per_token` of them. `capacity_factor` bounds an
    expert's tokens to that multiple of an even share, the later ones in the pack are dropped; 0 drops none. The two
    losses are coefficients.

    With `cross_every` n, every n-th block begins with gated cross-attention: text of a sample attends to the projected
    features of its own image and clip, which stand in the pack as well. Its gates start closed, so the untrained model
    is the one without it. It has the heads and the `mlp` of the block.
    """

    vocab: Positive = 1024
    dim: Positive = 192
    depth: Degree = 4
    heads: Degree = 6
    kv_heads: Degree = 2
    mlp: Positive = 512
    rope_theta: Above = 10_000.0
    norm_eps: Above = 1e-5
    head_dim: Count = 0
    qkv_bias: bool = False
    tied: bool = False
    experts: Count = 0
    experts_per_token: Degree = 2
    expert_every: Degree = 1
    expert_mlp: Count = 0
    capacity_factor: Amount = 0.0
    balance_loss: Amount = 0.01
    router_z_loss: Amount = 0.001
    cross_every: Count = 0

    @property
    def head_size(self) -> int:
        """Values of one attention head."""
        return self.head_dim or self.dim // self.heads

    @property
    def expert_size(self) -> int:
        """Inner width of one expert."""
        return self.expert_mlp or self.mlp

    @property
    def expert_blocks(self) -> tuple[int, ...]:
        """Blocks (from 0) that have experts."""
        return tuple(range(self.expert_every - 1, self.depth, self.expert_every)) if self.experts else ()

    @property
    def cross_blocks(self) -> tuple[int, ...]:
        """Blocks (from 0) that have cross-attention."""
        return tuple(range(self.cross_every - 1, self.depth, self.cross_every)) if self.cross_every else ()


Modality = Literal["text", "vision", "audio"]
"""What a place of a pack holds; padding counts as text."""


class ModelSection(Section, frozen=True):
    """The three-modality model, and where gradients stop in it (no setting here changes what it computes forward).

    `detach`: encoders whose features enter the fusion detached. They get zero gradients, are not decayed, and so keep
    their weights; their projectors train. `gradient_cuts`: decoder layer (from 0) -> modalities at whose places the
    gradient of what enters this layer is zero: of the hidden state, and of what its and later cross-attention sees.
    """

    vision: VisionSection = VisionSection()
    audio: AudioEncoderSection = AudioEncoderSection()
    decoder: DecoderSection = DecoderSection()
    detach: tuple[Literal["vision", "audio"], ...] = ()
    gradient_cuts: dict[int, tuple[Modality, ...]] = msgspec.field(default_factory=dict)
