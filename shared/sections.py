"""The sections of a run file, as frozen structs. A field's default is the value used when the file is silent.

The model's are in `model_sections`.

`data` is the shared section: daemon and trainer must hold the same one (they compare digests).
Units are in the names: `_s` seconds, `_hz` hertz, `_bytes` bytes; sides are pixels.
"""

import math
from typing import Annotated, Literal

from msgspec import Meta

from shared.model_sections import ModelSection
from shared.section import Above, Amount, Bytes, Count, Decay, Degree, Port, Positive, Seconds, Section, Seed, Share


class DatasetSection(Section, frozen=True):
    """One WebDataset: its name and its shards (paths or URLs, globs, brace lists, or @file with one a line).

    `weight` is its share of an epoch; without one, each of its samples comes once an epoch. Where every dataset has a
    weight, only their ratios count. `repeat_limit` is how often a sample may come in one epoch.
    """

    name: str
    shards: Annotated[tuple[str, ...], Meta(min_length=1)]
    weight: Above | None = None
    repeat_limit: Positive | None = None


class ImageSection(Section, frozen=True):
    """Aspect-ratio buckets under one pixel budget. `buckets` (height, width) overrides the derived ones."""

    pixel_budget: Annotated[int, Meta(ge=1, le=2**24)] = 128 * 128
    patch: Degree = 16
    merge: Degree = 1
    align: Degree = 1
    ratios: tuple[tuple[Degree, Degree], ...] = ((1, 1), (4, 3), (16, 9), (2, 1))
    buckets: tuple[tuple[int, int], ...] = ()
    max_ratio: Annotated[float, Meta(ge=1)] = 200.0
    max_pixels: Positive = 100_000_000

    @property
    def multiple(self) -> int:
        """Every bucket side is a multiple of this: LCM of patch x merge and tensor-parallel alignment."""
        return math.lcm(self.patch * self.merge, self.align)


class AudioSection(Section, frozen=True):
    """Duration classes. One model token covers `samples_per_token` samples (mel hop x strides)."""

    rate_hz: Positive = 16_000
    classes_s: tuple[Seconds, ...] = (2.0, 4.0, 8.0)
    samples_per_token: Positive = 1280
    max_s: Seconds = 600.0


class TextSection(Section, frozen=True):
    """Captions. `tokenizer` is a tokenizers JSON file, or `bytes` for UTF-8 bytes plus special tokens."""

    tokenizer: str = "bytes"
    max_tokens: Positive = 128
    expected_tokens: Positive = 32
    bad_utf8: Literal["replace", "reject"] = "replace"


Cost = Annotated[float, Meta(ge=0, le=1000)]


class CostSection(Section, frozen=True):
    """What a sample is taken to cost a training step, in units of one decoder token; it balances data ranks.

    A sample of L tokens with an image of P patches (before the merge) and a clip of F frames (20 ms each, counted to
    the end of its class) costs `patch` x P + `frame` x F + `token` x L + `token_pair` x L^2.

    Defaults: forward FLOPs of deploy/configs/clip-l-whisper-small-3b.yaml, where a weight costs 2 a token (Kaplan et
    al. 2020, section 2.1) and causal attention 2 x depth x width x L^2, divided by the decoder's 2 x 3.09e9 a token:
    patch 3.02e8 / 3.09e9, and a tenth for attention over 576 patches; frame 8.5e7 / 3.09e9, likewise; token_pair
    2 x 36 x 2048 / 6.17e9. For another model only the ratios matter: weights of a part over weights of the decoder.
    """

    patch: Cost = 0.1
    frame: Cost = 0.03
    token: Cost = 1.0
    token_pair: Cost = 2.4e-5


class BatchSection(Section, frozen=True):
    """A global batch is `micro_batches` packs of `tokens` tokens; `round` of them share one shape.

    `round` bounds data parallelism: the number of data-parallel ranks must divide it, so that at every
    micro-step all ranks hold one shape and the global batch is the same for any such number. Inside a global batch
    samples are spread by `cost`.
    """

    tokens: Positive = 1024
    micro_batches: Degree = 4
    round: Degree = 2
    leftovers: Literal["pad", "drop"] = "pad"
    cost: CostSection = CostSection()


class DataSection(Section, frozen=True):
    """What is trained on, and in which order: the section both halves must agree on.

    `skip_steps` are ranges [first, end) of global batches that nobody trains on, numbered from 0 over all epochs as
    the trainer's steps are. They may change between runs of one job: a checkpoint's cursor stays valid.
    """

    datasets: tuple[DatasetSection, ...]
    seed: int = 0
    skip_steps: tuple[tuple[int, int], ...] = ()
    missing_shards: Literal["fail", "skip"] = "fail"
    image: ImageSection = ImageSection()
    audio: AudioSection = AudioSection()
    text: TextSection = TextSection()
    batch: BatchSection = BatchSection()


class QuarantineSection(Section, frozen=True):
    """How many bad samples a run bears before it stops loudly."""

    max_consecutive: Positive = 64
    max_share: Share = 0.2
    after_samples: Count = 1000


class JobSection(Section, frozen=True):
    """Another job that the daemon serves: the same data under its own seed, with slots of its own."""

    name: str
    seed: int = 0


class LoaderSection(Section, frozen=True):
    """The daemon on one node. `jpeg: reduced` decodes a JPEG on a CPU in the fastest way: at 1/2, 1/4 or 1/8 where that
    is enough for its bucket, with a bilinear last step below a shrink of 1.5. `full`: whole, by DALI, and area resize.

    `endpoint` is this node's daemon; `listen` a second address it serves, tcp://HOST:PORT, for readers elsewhere.
    `endpoints` are the daemons that a trainer reads from, by default `endpoint` alone: data rank r begins with number
    r of them, and goes to the next when one is lost. `lane` is how batches come: through shared memory (`slots`), as
    frames (`tcp`), or the first where it can be mapped (`auto`). `cuda` is `slots`, but pixels stay on the GPU where
    the daemon decodes on that of a stream's only reader (`device: gpu`); it takes `slots_per_stream` x the pixels of
    the largest micro-batch of the GPU's memory. `keys_dir` holds what `millstream-loader keys` made; a TCP address off
    the loopback is refused without it unless `allow_plain_tcp` is set.
    `slots_per_stream` and `max_streams` count for each job apart: the run file's own and those of `jobs`.
    With `index_dir` the indexes lie there, not beside the shards, and so do each job's last two epochs' plans, 16 bytes
    a sample, which a daemon that starts again maps instead of making them, and how long every epoch was. Readers of a
    stream that starve because all slots are kept for one that is not here go on without it after `absent_s`; one that
    starves because others hold all slots with later batches is told so after `held_up_s`. The metrics page is bound to
    `metrics_host` ("::" is every address, of IPv4 too).
    A reader that is not heard for `lease_s` is gone; a draining daemon waits `drain_s` for leases. `grace_s` changes
    nothing here: it states what the supervisor leaves between SIGTERM and SIGKILL (TimeoutStopSec of systemd,
    terminationGracePeriodSeconds of Kubernetes), and `drain_s` must be below it. A worker that takes more than
    `worker_s` for a micro-batch is replaced. `threads` are those of each worker, and of indexing.
    `mps` is how a GPU that decodes is shared with a trainer: through CUDA's Multi-Process Service where a control
    daemon answers (`auto`), also by one started for it (`start`), or by time slices whatever there is (`off`).
    """

    endpoint: str = "ipc:///tmp/millstream-{uid}-{job}.sock"
    listen: str = ""
    endpoints: tuple[str, ...] = ()
    lane: Literal["auto", "slots", "tcp", "cuda"] = "auto"
    keys_dir: str = ""
    allow_plain_tcp: bool = False
    jobs: tuple[JobSection, ...] = ()
    workers: Degree = 1
    threads: Degree = 2
    device: Literal["cpu", "gpu"] = "cpu"
    gpu_id: Count = 0
    mps: Literal["auto", "start", "off"] = "auto"
    jpeg: Literal["reduced", "full"] = "reduced"
    slots_per_stream: Annotated[int, Meta(ge=2, le=2**31 - 1)] = 4
    max_streams: Degree = 2
    shm_dir: str = "/dev/shm"
    index_dir: str = ""
    cache_dir: str = ""
    cache_bytes: Bytes = 1 << 34
    read_s: Seconds = 40.0
    metrics_host: str = "127.0.0.1"
    metrics_port: Port = 9100
    heartbeat_s: Seconds = 1.0
    lease_s: Seconds = 300.0
    absent_s: Seconds = 5.0
    held_up_s: Seconds = 10.0
    drain_s: Seconds = 10.0
    grace_s: Seconds = 30.0
    worker_s: Seconds = 60.0
    quarantine: QuarantineSection = QuarantineSection()


class StageSection(Section, frozen=True):
    """A pipeline stage: its layers, `head` or `encode..decoder.3`. What else it states all stages must share."""

    layers: str
    micro_batch_tokens: Count = 0
    tensor: Count = 0
    active_experts: Count = 0


class MeshSection(Section, frozen=True):
    """Degrees of parallelism; their product (expert excepted) is the number of processes.

    `expert` groups are runs of so many neighbouring data ranks: they see different data and share out the experts. Rows
    travel between them as all else does (NCCL on GPUs), or with `expert_backend: gloo` by way of the hosts' memory, for
    machines where NCCL's all-to-all does not work.
    `stages` says where the pipeline is cut; else `balance` does: by parameters, or by time measured at the start.

    Of a tensor group: with `sequence_parallel` each rank keeps its share of a pack's places wherever layers are not
    cut (norms, residual sums), which saves memory and costs nothing on the way; with `encoder_data_parallel` each
    rank encodes its share of a micro-batch's images and clips, and the gradients of the encoders are summed over the
    group for every micro-batch, which pays where encoding takes longer than that.
    """

    pipe: Degree = 1
    data: Degree = 1
    tensor: Degree = 1
    expert: Degree = 1
    expert_backend: Literal["auto", "gloo"] = "auto"
    stages: tuple[StageSection, ...] = ()
    balance: Literal["parameters", "measured"] = "parameters"
    sequence_parallel: bool = False
    encoder_data_parallel: bool = False


class OptimSection(Section, frozen=True):
    """Optimizer and schedule: linear warm-up, then cosine to `min_lr_share` of `lr` at `steps`.

    `betas` are AdamW's, `momentum` is SGD's.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    lr: Amount = 1e-3
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    momentum: Decay = 0.0
    weight_decay: Amount = 0.1
    warmup_steps: Count = 10
    min_lr_share: Share = 0.1
    clip: Amount = 1.0


class CheckpointSection(Section, frozen=True):
    """How checkpoints are written.

    `asynchronous`: training goes on meanwhile; each rank keeps a copy of its share in CPU memory for that (page-locked
    with CUDA; AdamW: 12 bytes for each parameter of its stage and slice, divided by the data ranks). `write_s` bounds
    the writing of one.
    """

    asynchronous: bool = True
    write_s: Seconds = 240.0


Blocks = int | Literal["all"]
"""A choice of blocks: the first n, the last n for -n, or all."""


class RecomputeSection(Section, frozen=True):
    """Blocks whose activations are not kept but computed again in the backward pass; gradients stay exact."""

    vision: Blocks = 0
    audio: Blocks = 0
    decoder: Blocks = 0
    projectors: bool = False
    cross_attention: bool = False


ModelPart = Literal[
    "vision", "audio", "vision_projector", "audio_projector", "embedding", "decoder", "cross_attention", "head"
]


class TrainSection(Section, frozen=True):
    """The training run. `init_from` is a safetensors file in this model's names that step 0 starts from.

    Rank r's metrics page is on `metrics_host`, port `metrics_port` + r; there is none for port 0.
    `attention` names a backend of `trainer.models.attention`; `auto` takes the fastest that is right on this machine.
    `compile` has torch.compile make the loss's kernels and, except under ZeRO-3, the blocks'; `auto` does so on CUDA.
    `peak_tflops` is one device's dense bf16 peak, which MFU is a share of; 0 looks it up by the device's name.
    `trackers` get every step's numbers beside metrics.jsonl, in the run folder; Weights & Biases offline unless
    WANDB_MODE says otherwise.
    `freeze`: parts that are not trained and take no room in the optimizer. `offload_optimizer`: the optimizer's state
    and step are the CPU's. `deterministic`: the same bits in every run of one layout on one kind of machine.
    A step whose loss or gradient norm is not finite changes nothing; `skip_limit` of them in a row end the run.
    """

    steps: Positive = 100
    precision: Literal["fp32", "bf16"] = "fp32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    zero_stage: Annotated[int, Meta(ge=0, le=3)] = 1
    offload_optimizer: bool = False
    recompute: RecomputeSection = RecomputeSection()
    freeze: tuple[ModelPart, ...] = ()
    deterministic: bool = False
    skip_limit: Positive = 10
    seed: Seed = 0
    run_dir: str = "runs/{job}"
    init_from: str = ""
    save_every: Count = 0
    keep: Positive = 3
    log_every: Positive = 10
    wait_s: Seconds = 120.0
    metrics_host: str = "127.0.0.1"
    metrics_port: Port = 0
    attention: Literal["auto", "flash4", "flash2", "sdpa", "math"] = "auto"
    compile: bool | Literal["auto"] = "auto"
    peak_tflops: Amount = 0.0
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    optim: OptimSection = OptimSection()
    checkpoint: CheckpointSection = CheckpointSection()


class RunConfig(Section, frozen=True):
    """A whole run file."""

    job: str
    data: DataSection
    loader: LoaderSection = LoaderSection()
    mesh: MeshSection = MeshSection()
    model: ModelSection = ModelSection()
    train: TrainSection = TrainSection()
