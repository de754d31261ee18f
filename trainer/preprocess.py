"""From a leased `Batch` to a `DeviceBatch`: copy to the device, then patches, log-mel frames and index tensors there.

On CUDA there are two device buffers, A and B, used in turn. The bytes of a slot go to one of them in a single copy on a
copy stream (in the cuda lane the pixels by a copy of their own, from device memory); its event gives the slot back and
lets the compute stream go on with one CUDA graph per (group, buffer). So the copy of batch n+1 runs beside the step of
batch n. Invariants: a buffer is overwritten only after the graph that
reads it has run, and a `DeviceBatch` is valid until the second next one is asked for, for work queued on the stream
that was current then. On a CPU the same path runs eagerly, everything is copied, and a batch stays valid for good.

Integers become int64, which embedding, gather and loss take; `cu_seqlens` and `mel_lengths_M` stay int32, as
variable-length attention wants them.
"""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from shared.batch import BatchSpec, Cursor, batch_spec, groups
from shared.errors import ConfigError
from shared.model_sections import ModelSection
from shared.sections import DataSection
from trainer.audio_frontend import mel_filters_fm
from trainer.batches import Batch, Counts, gather, views
from trainer.features import LogMel, Patches

BUFFERS = 2


class Source(Protocol):
    """What `prefetch` needs of a client."""

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether the next batch is there."""

    def __next__(self) -> Batch:
        """The next batch, waiting for it."""


class Tensors(NamedTuple):
    """A micro-batch on the device. T tokens, K samples, N images of h x w patches, M clips of F frames and m mels."""

    tokens_T: Tensor
    labels_T: Tensor
    positions_T: Tensor
    segments_T: Tensor
    features_T: Tensor
    cu_seqlens: Tensor
    patches_NhwP: Tensor
    mels_MmF: Tensor
    mel_lengths_M: Tensor


class DeviceBatch(msgspec.Struct, frozen=True):
    """A micro-batch ready for the model, and what its header said.

    `after` is the cursor to save once it is consumed. `wait_s` is how long the client waited for it, `preprocess_s` the
    host's time to queue its copy and its graph (on a CPU: to do the work).
    """

    tensors: Tensors
    cursor: Cursor
    after: Cursor
    batch_id: str
    group: int
    counts: Counts
    step_labels: int
    sample_ids: tuple[int, ...]
    substituted: int
    checksum: int
    wait_s: float
    preprocess_s: float
    skipped_from: Cursor | None = None

    @property
    def grid_hw(self) -> tuple[int, int]:
        """Patch rows and columns of its images; (0, 0) without images."""
        height, width = self.tensors.patches_NhwP.shape[1:3]
        return int(height), int(width)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """All tensors but the labels, in the order that the model takes."""
        return (self.tensors.tokens_T, *self.tensors[2:])


class Staged(msgspec.Struct):
    """A batch whose bytes are on their way into `payload`."""

    batch: Batch
    payload: Tensor
    seconds: float


class Transform:
    """The payload's fields as the model wants them. Every result is new memory."""

    def __init__(self, data: DataSection, model: ModelSection, device: torch.device, dtype: torch.dtype) -> None:
        audio = model.audio
        filters = mel_filters_fm(audio.n_fft, audio.mels, data.audio.rate_hz).to(device)
        self._hop, self._dtype = audio.hop, dtype
        self._patches = Patches(data.image.patch, device, model.vision.pixels)
        self._log_mel = LogMel(filters, audio.n_fft, audio.hop)

    def __call__(self, fields: dict[str, Tensor]) -> Tensors:
        """Patches and mels in the model's dtype."""
        return Tensors(
            tokens_T=fields["tokens_T"].long(),
            labels_T=fields["labels_T"].long(),
            positions_T=fields["positions_T"].long(),
            segments_T=fields["segments_T"].long(),
            features_T=fields["features_T"].long(),
            cu_seqlens=fields["cu_seqlens"].clone(),
            patches_NhwP=self._patches(fields["pixels_NHWC"]).to(self._dtype),
            mels_MmF=self._log_mel(fields["clips_MS"]).to(self._dtype),
            mel_lengths_M=(fields["clip_lengths_M"] + self._hop - 1) // self._hop,
        )


class Preprocessor:
    """Call it on a batch, or iterate `prefetch(client)`, which overlaps copies with steps; one of them at a time.

    A batch with a token that the model has no embedding for raises ConfigError: on a GPU a look-up of it would end the
    process without a name.
    """

    def __init__(
        self, data: DataSection, model: ModelSection, device: torch.device | str, dtype: torch.dtype = torch.float32
    ) -> None:
        device = _indexed(torch.device(device))
        transform = Transform(data, model, device, dtype)
        specs = tuple(batch_spec(group) for group in groups(data))
        self._lane: EagerLane | GraphLane
        self._lane = GraphLane(transform, specs, device) if device.type == "cuda" else EagerLane(transform)
        self._vocab = model.decoder.vocab

    def __call__(self, batch: Batch) -> DeviceBatch:
        """Copy and transform one batch; it is released as soon as its bytes are copied."""
        return self._finish(self._stage(batch))

    def prefetch(self, client: Source) -> Iterator[DeviceBatch]:
        """Every batch of the client, the next one's copy already under way while one is being used.

        It waits for a batch only when there is nothing else to hand out. The client's position is up to one batch
        ahead of what was yielded: save `DeviceBatch.after`, not the position.
        """
        staged = self._stage_next(client)
        while staged:
            current = self._finish(staged)
            staged = self._stage_next(client) if client.poll() else None
            yield current
            staged = staged or self._stage_next(client)

    def warm_up(self) -> None:
        """Capture every graph now rather than at its first batch; nothing on a CPU."""
        self._lane.warm_up()

    def _stage_next(self, client: Source) -> Staged | None:
        try:
            return self._stage(next(client))
        except StopIteration:
            return None

    def _stage(self, batch: Batch) -> Staged:
        started = time.perf_counter()
        if (largest := int(batch.fields["tokens_T"].max())) >= self._vocab:
            rule = f"has no place for token {largest}, which data.text.tokenizer gives"
            raise ConfigError("model.decoder.vocab", self._vocab, rule, "set the tokenizer's size or more")
        payload = self._lane.stage(batch)
        return Staged(batch, payload, time.perf_counter() - started)

    def _finish(self, staged: Staged) -> DeviceBatch:
        started = time.perf_counter()
        batch = staged.batch
        tensors = self._lane.finish(staged.payload, batch.spec)
        seconds = staged.seconds + time.perf_counter() - started
        named = (batch.cursor, batch.after, batch.batch_id, batch.group, batch.counts, batch.step_labels)
        rest = (batch.sample_ids, batch.substituted, batch.checksum, batch.wait_s, seconds, batch.skipped_from)
        return DeviceBatch(tensors, *named, *rest)


class EagerLane:
    """The CPU's way: clone the payload, transform the clone."""

    def __init__(self, transform: Transform) -> None:
        self._transform = transform

    def stage(self, batch: Batch) -> Tensor:
        """A copy of the batch's bytes; the batch is released."""
        payload = torch.empty_like(batch.payload)
        gather(payload, batch)
        batch.release()
        return payload

    def finish(self, payload: Tensor, spec: BatchSpec) -> Tensors:
        """Its tensors, in memory of their own."""
        return self._transform(views(payload, spec))

    def warm_up(self) -> None:
        """Nothing to prepare."""


class Buffer(msgspec.Struct):
    """Device memory for the bytes of one batch. `copied`: they are there. `consumed`: nobody reads them any more."""

    payload: Tensor
    copied: torch.cuda.Event
    consumed: torch.cuda.Event


class Captured(msgspec.Struct):
    """A graph and the tensors it writes."""

    graph: torch.cuda.CUDAGraph
    tensors: Tensors


class GraphLane:
    """CUDA's way: two buffers in turn, a copy stream, one graph per (group, buffer).

    `stage` fills the buffers in turn and `finish` must follow in the same order, before the buffer's turn comes again.
    """

    def __init__(self, transform: Transform, specs: tuple[BatchSpec, ...], device: torch.device) -> None:
        self._transform, self._specs, self._device = transform, specs, device
        size_bytes = max(spec.size_bytes for spec in specs)
        self._buffers = [_buffer(size_bytes, device) for _ in range(BUFFERS)]
        self._copies = _stream(device)
        self._pools = [torch.cuda.graph_pool_handle() for _ in range(BUFFERS)]
        self._graphs: dict[tuple[int, int], Captured] = {}
        self._staged = self._finished = 0

    def stage(self, batch: Batch) -> Tensor:
        """Queue the copy of the batch's bytes; the batch is released when the copy is done."""
        buffer = self._buffers[self._staged % BUFFERS]
        self._staged += 1
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(buffer.consumed)
            gather(buffer.payload, batch)
        buffer.copied = _event()
        buffer.copied.record(self._copies)
        batch.release(buffer.copied)
        return buffer.payload

    def finish(self, payload: Tensor, spec: BatchSpec) -> Tensors:
        """Queue the transform of the buffer staged longest ago on the current stream."""
        place = self._finished % BUFFERS
        self._finished += 1
        buffer = self._buffers[place]
        captured = self._captured(spec, place)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(buffer.copied)
        captured.graph.replay()
        buffer.consumed.record(stream)
        return captured.tensors

    def warm_up(self) -> None:
        """Capture all graphs."""
        for spec in self._specs:
            for place in range(BUFFERS):
                self._captured(spec, place)

    def _captured(self, spec: BatchSpec, place: int) -> Captured:
        key = spec.group, place
        if key not in self._graphs:
            self._graphs[key] = self._capture(views(self._buffers[place].payload, spec), self._pools[place])
        return self._graphs[key]

    def _capture(self, fields: dict[str, Tensor], pool: Any) -> Captured:
        """Run once for real, which sets up the FFT plan, then record. Both only read the buffer.

        The graphs of one buffer share the memory of their intermediate results: they never run at the same time.
        """
        stream = _stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._transform(fields)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            tensors = self._transform(fields)
        return Captured(graph, tensors)


def _indexed(device: torch.device) -> torch.device:
    """`cuda` alone means the current device."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _buffer(size_bytes: int, device: torch.device) -> Buffer:
    return Buffer(torch.empty(size_bytes, dtype=torch.uint8, device=device), _event(), _event())


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
