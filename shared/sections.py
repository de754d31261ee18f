"""The sections of a run file, as frozen structs. A field's default is the value used when the file is silent.

`data` is the shared section: daemon and trainer must hold the same one (they compare digests).
Units are in the names: `_s` seconds, `_hz` hertz, `_bytes` bytes; sides are pixels.
"""

import math
from typing import Literal

import msgspec


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the run file; unknown keys are refused."""


class DatasetSection(Section, frozen=True):
    """One WebDataset: its name and its shards (paths or URLs, globs, brace lists, or @file with one a line).

    `weight` is its share of an epoch; without one, each of its samples comes once an epoch. Where every dataset has a
    weight, only their ratios count. `repeat_limit` is how often a sample may come in one epoch.
    """

    name: str
    shards: tuple[str, ...]
    weight: float | None = None
    repeat_limit: int | None = None


class ImageSection(Section, frozen=True):
    """Aspect-ratio buckets under one pixel budget. `buckets` (height, width) overrides the derived ones."""

    pixel_budget: int = 128 * 128
    patch: int = 16
    merge: int = 1
    align: int = 1
    ratios: tuple[tuple[int, int], ...] = ((1, 1), (4, 3), (16, 9), (2, 1))
    buckets: tuple[tuple[int, int], ...] = ()
    max_ratio: float = 200.0
    max_pixels: int = 100_000_000

    @property
    def multiple(self) -> int:
        """Every bucket side is a multiple of this: LCM of patch x merge and tensor-parallel alignment."""
        return math.lcm(self.patch * self.merge, self.align)


class AudioSection(Section, frozen=True):
    """Duration classes. One model token covers `samples_per_token` samples (mel hop x strides)."""

    rate_hz: int = 16_000
    classes_s: tuple[float, ...] = (2.0, 4.0, 8.0)
    samples_per_token: int = 1280
    max_s: float = 600.0


class TextSection(Section, frozen=True):
    """Captions. `tokenizer` is a tokenizers JSON file, or `bytes` for UTF-8 bytes plus special tokens."""

    tokenizer: str = "bytes"
    max_tokens: int = 128
    expected_tokens: int = 32
    bad_utf8: Literal["replace", "reject"] = "replace"


class BatchSection(Section, frozen=True):
    """A global batch is `micro_batches` packs of `tokens` tokens; `round` of them share one shape.

    `round` bounds data parallelism: the number of data-parallel ranks must divide it, so that at every
    micro-step all ranks hold one shape and the global batch is the same for any such number.
    """

    tokens: int = 1024
    micro_batches: int = 4
    round: int = 2
    leftovers: Literal["pad", "drop"] = "pad"


class DataSection(Section, frozen=True):
    """What is trained on, and in which order: the section both halves must agree on."""

    datasets: tuple[DatasetSection, ...]
    seed: int = 0
    missing_shards: Literal["fail", "skip"] = "fail"
    image: ImageSection = ImageSection()
    audio: AudioSection = AudioSection()
    text: TextSection = TextSection()
    batch: BatchSection = BatchSection()


class QuarantineSection(Section, frozen=True):
    """How many bad samples a run bears before it stops loudly."""

    max_consecutive: int = 64
    max_share: float = 0.2
    after_samples: int = 1000


class LoaderSection(Section, frozen=True):
    """The daemon on one node. `jpeg: reduced` decodes a JPEG at 1/2, 1/4 or 1/8 where that is enough for its bucket."""

    endpoint: str = "ipc:///tmp/millstream-{uid}-{job}.sock"
    workers: int = 1
    threads: int = 2
    device: Literal["cpu", "gpu"] = "cpu"
    gpu_id: int = 0
    jpeg: Literal["reduced", "full"] = "reduced"
    slots_per_stream: int = 4
    max_streams: int = 2
    shm_dir: str = "/dev/shm"
    index_dir: str = ""
    cache_dir: str = ""
    cache_bytes: int = 1 << 34
    read_s: float = 40.0
    metrics_port: int = 9100
    heartbeat_s: float = 1.0
    lease_s: float = 300.0
    drain_s: float = 10.0
    grace_s: float = 30.0
    worker_s: float = 60.0
    quarantine: QuarantineSection = QuarantineSection()


class MeshSection(Section, frozen=True):
    """Degrees of parallelism; their product (expert excepted) is the number of processes.

    `expert` groups are runs of so many neighbouring data ranks: they see different data and share out the experts.
    """

    pipe: int = 1
    data: int = 1
    tensor: int = 1
    expert: int = 1


Activation = Literal["gelu", "gelu_tanh", "quick_gelu"]
"""Exact GELU, its tanh approximation, or x * sigmoid(1.702 x)."""


class VisionSection(Section, frozen=True):
    """Vision transformer. `grid` is the side of the learned position grid, resampled to each bucket.

    CLIP's form: class_token and pre_norm (a norm before the first block) on, patch_bias off. SigLIP's: pixels half.
    `pixels` names the per-channel normalisation: CLIP's constants, or mean and deviation 0.5.
    """

    dim: int = 128
    depth: int = 3
    heads: int = 4
    mlp: int = 512
    grid: int = 8
    class_token: bool = False
    pre_norm: bool = False
    patch_bias: bool = True
    activation: Activation = "gelu"
    norm_eps: float = 1e-5
    pixels: Literal["clip", "half"] = "clip"


class AudioEncoderSection(Section, frozen=True):
    """Whisper-form audio encoder over `mels` log-mel bins; `stack` frames after the strided stem make a token.

    Whisper's own weights: positions table (`places` stored rows, never trained) and key_bias off.
    """

    dim: int = 128
    depth: int = 3
    heads: int = 4
    mlp: int = 512
    mels: int = 80
    n_fft: int = 400
    hop: int = 160
    max_s: float = 30.0
    positions: Literal["sinusoid", "table"] = "sinusoid"
    places: int = 1500
    key_bias: bool = True
    activation: Activation = "gelu"


class DecoderSection(Section, frozen=True):
    """Llama-form decoder: grouped-query attention, rotary positions, SwiGLU, RMSNorm.

    Qwen2's form: qkv_bias on. `tied`: the head shares the embedding's weight. `head_dim` 0 means dim / heads.

    With `experts`, every `expert_every`-th block has that many SwiGLU networks of inner width `expert_mlp` (0: mlp)
    instead of one, and a router that sends each token to `experts_per_token` of them. `capacity_factor` bounds an
    expert's tokens to that multiple of an even share, the later ones in the pack are dropped; 0 drops none. The two
    losses are coefficients.
    """

    vocab: int = 1024
    dim: int = 192
    depth: int = 4
    heads: int = 6
    kv_heads: int = 2
    mlp: int = 512
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    head_dim: int = 0
    qkv_bias: bool = False
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 2
    expert_every: int = 1
    expert_mlp: int = 0
    capacity_factor: float = 0.0
    balance_loss: float = 0.01
    router_z_loss: float = 0.001

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


class ModelSection(Section, frozen=True):
    """The three-modality model."""

    vision: VisionSection = VisionSection()
    audio: AudioEncoderSection = AudioEncoderSection()
    decoder: DecoderSection = DecoderSection()


class OptimSection(Section, frozen=True):
    """Optimizer and schedule: linear warm-up, then cosine to `min_lr_share` of `lr` at `steps`."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    warmup_steps: int = 10
    min_lr_share: float = 0.1
    clip: float = 1.0


class TrainSection(Section, frozen=True):
    """The training run. `init_from` is a safetensors file in this model's names that step 0 starts from."""

    steps: int = 100
    precision: Literal["fp32", "bf16"] = "fp32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    zero_stage: int = 1
    seed: int = 0
    run_dir: str = "runs/{job}"
    init_from: str = ""
    save_every: int = 0
    keep: int = 3
    log_every: int = 10
    wait_s: float = 120.0
    metrics_port: int = 0
    optim: OptimSection = OptimSection()


class RunConfig(Section, frozen=True):
    """A whole run file."""

    job: str
    data: DataSection
    loader: LoaderSection = LoaderSection()
    mesh: MeshSection = MeshSection()
    model: ModelSection = ModelSection()
    train: TrainSection = TrainSection()
