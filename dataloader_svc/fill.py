"""A task becomes a filled slot: read, decode, substitute, lay out. Deterministic: the same task gives the same bytes.

A sample that fails gives its place to the first spare that decodes and whose planned tokens fit in its room; without
one the micro-batch is a sample shorter. Samples that made it stand side by side from slot row 0; every byte of the
payload is written, because slots are used again.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from dataloader_svc import text
from dataloader_svc.bucket import clip_tokens
from dataloader_svc.decode import Decoder
from dataloader_svc.index import Index
from dataloader_svc.lent import LentParts, Row
from dataloader_svc.store import Reader
from dataloader_svc.tasks import Done, Task, Timings, Verdict
from shared.batch import PIXELS, BatchSpec, FieldSpec, Group, audio_tokens, batch_spec, groups
from shared.errors import SampleError
from shared.sections import DataSection

CHECKSUM_BITS = 63

Announce = Callable[[int], None]
NO_CLIP = np.zeros(0, np.int16)


class Encoded(msgspec.Struct, frozen=True):
    """The bytes of one sample's members."""

    image: bytes
    audio: bytes
    text: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.image) + len(self.audio) + len(self.text)


class Decoded(msgspec.Struct, frozen=True):
    """One sample, ready to be laid out; an empty clip where it has none."""

    sample_id: int
    pixels: Row | None
    clip: NDArray[np.int16]
    caption: list[int]


Outcome = Decoded | SampleError


class Filler:
    """Fills payloads for one worker. `index`, `reader` and `decoder` are only used, never closed.

    `lent` writes the pixels of tasks that have a target, where the worker has a GPU.
    """

    def __init__(
        self,
        data: DataSection,
        index: Index,
        reader: Reader,
        decoder: Decoder,
        threads: int,
        lent: LentParts | None = None,
    ) -> None:
        self._data, self._index, self._reader, self._decoder, self._lent = data, index, reader, decoder, lent
        self._tokenizer = text.Tokenizer.load(data.text.tokenizer)
        self._groups = groups(data)
        self._specs = tuple(batch_spec(group) for group in self._groups)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="read")

    def fill(self, task: Task, payload: NDArray[np.uint8], announce: Announce) -> Done:
        """Write the task's micro-batch into `payload` (uint8, at least the group's size) and report.

        `announce(sample_id)` is called before each decode of a careful task, and while storage keeps a read waiting.

        Raises:
            ShardError: a shard cannot be read. A stand-in would change the batch, so the task fails as a whole.
            DeviceError: the GPU cannot be used any more.
        """
        run = _Run(task, announce)
        kept = list(self._kept(run, self._groups[task.group]))
        started = time.perf_counter()
        spec = self._specs[task.group]
        fields = views(spec, payload)
        counts = self._lay_out(kept, self._groups[task.group], fields)
        rows = [sample.pixels for sample in kept if sample.pixels is not None]
        on_device = self._write_pixels(task, rows, fields[PIXELS], spec.pixels)
        checksum = _checksum(payload, spec, on_device and not (task.target and task.target.hashed))
        timings = Timings(run.read_s, run.decode_s, time.perf_counter() - started)
        ids = tuple(sample.sample_id for sample in kept)
        substituted = sum(1 for i in ids if i not in task.sample_ids)
        report = Done(task.id, checksum, counts, ids, substituted, tuple(run.verdicts), timings, run.read_bytes)
        retries, fetched_bytes = self._reader.store.tally.take()
        return msgspec.structs.replace(report, retries=retries, fetched_bytes=fetched_bytes, on_device=on_device)

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _kept(self, run: "_Run", group: Group) -> Iterator[Decoded]:
        """The planned samples that are good, each bad one replaced where a spare can."""
        ids = run.task.sample_ids
        for sample_id, outcome in zip(ids, self._try(ids, group, run), strict=True):
            found = outcome if isinstance(outcome, Decoded) else self._substitute(sample_id, group, run)
            if found:
                yield found

    def _substitute(self, sample_id: int, group: Group, run: "_Run") -> Decoded | None:
        room = self._planned_tokens(sample_id, group)
        for spare in [i for i in run.spares if self._planned_tokens(i, group) <= room]:
            run.spares.remove(spare)
            outcome = self._try([spare], group, run)[0]
            if isinstance(outcome, Decoded):
                return outcome
        return None

    def _planned_tokens(self, sample_id: int, group: Group) -> int:
        row = self._index.row(sample_id)
        return 2 + group.image_tokens + self._planned_clip_tokens(row.clip_samples, group) + row.text_tokens

    def _planned_clip_tokens(self, clip_samples: int, group: Group) -> int:
        return int(clip_tokens(group, np.array([clip_samples]), self._data.audio)[0])

    def _try(self, sample_ids: Sequence[int], group: Group, run: "_Run") -> list[Outcome]:
        """Decode samples, together or (careful) one after the other; verdicts go into `run`."""
        steps = [[i] for i in sample_ids] if run.task.careful else [list(sample_ids)]
        outcomes = [outcome for step in steps if step for outcome in self._try_together(step, group, run)]
        for sample_id, outcome in zip(sample_ids, outcomes, strict=True):
            if isinstance(outcome, SampleError):
                run.verdicts.append(Verdict(sample_id, outcome.reason, outcome.detail))
        return outcomes

    def _try_together(self, sample_ids: list[int], group: Group, run: "_Run") -> list[Outcome]:
        wanted = [i for i in sample_ids if i not in run.task.skip]
        if run.task.careful:
            for sample_id in wanted:
                run.announce(sample_id)
        started = time.perf_counter()
        found = dict(zip(wanted, self._threads.map(partial(self._read, run), wanted), strict=True))
        read = time.perf_counter()
        stay = self._lent is not None and run.task.target is not None
        decoded = dict(zip(found, self._decode(found, group, stay), strict=True))
        run.spent(read - started, time.perf_counter() - read, sum(e.size_bytes for e in found.values()))
        convicted = SampleError("decoder_crash", "the decoder process dies of it")
        return [decoded.get(i, convicted) for i in sample_ids]

    def _read(self, run: "_Run", sample_id: int) -> Encoded:
        """A sample's bytes; storage that fails is no fault of the sample's, so its ShardError ends the worker."""
        row, waiting = self._index.row(sample_id), partial(run.announce, sample_id)
        spans = (row.image, row.audio, row.text)
        return Encoded(*(self._reader.read(row.shard, *span, waiting) if span else b"" for span in spans))

    def _decode(self, encoded: Mapping[int, Encoded], group: Group, stay: bool) -> list[Outcome]:
        """Every sample with all of its modalities, or the first verdict against it."""
        samples = list(encoded.values())
        pixels: list[Any] = [None] * len(samples)
        clips: list[Any] = [NO_CLIP] * len(samples)
        if group.bucket:
            pixels = self._decoder.decode_images([sample.image for sample in samples], group.bucket, stay)
        if group.clip_samples:
            limits = [self._clip_limit(sample_id, group) for sample_id in encoded]
            clips = list(self._threads.map(self._clip, samples, limits))
        parts = zip(encoded, pixels, clips, map(self._caption, samples), strict=True)
        return [self._joined(*part) for part in parts]

    def _clip_limit(self, sample_id: int, group: Group) -> int:
        """Samples of the clip that the plan has room for: a header may promise fewer than the decoder gives.

        0 without a clip: such a sample may ride in a group of samples with one.
        """
        planned = self._planned_clip_tokens(self._index.row(sample_id).clip_samples, group)
        return planned * self._data.audio.samples_per_token

    def _clip(self, sample: Encoded, limit: int) -> NDArray[np.int16] | SampleError:
        return self._decoder.decode_audio(sample.audio, limit) if limit else NO_CLIP

    def _caption(self, sample: Encoded) -> list[int] | SampleError:
        try:
            words = text.caption(sample.text, self._data.text.bad_utf8)
        except SampleError as error:
            return error
        return self._tokenizer.encode(words)[: self._data.text.max_tokens]

    @staticmethod
    def _joined(sample_id: int, pixels: Any, clip: Any, caption: Any) -> Outcome:
        verdict = next((part for part in (pixels, clip, caption) if isinstance(part, SampleError)), None)
        return verdict or Decoded(sample_id, pixels, clip, caption)

    def _lay_out(
        self, kept: Sequence[Decoded], group: Group, fields: Mapping[str, NDArray[Any]]
    ) -> tuple[int, int, int, int, int]:
        clips = [sample.clip for sample in kept] if group.clip_samples else []
        parts = [text.Part(s.caption, audio_tokens(len(s.clip), self._data.audio)) for s in kept]
        tokens, labels = text.assemble(fields, parts, group, self._tokenizer)
        _write_rows(fields["clips_MS"], clips)
        _write_rows(fields["clip_lengths_M"], [np.int32(len(clip)) for clip in clips])
        heard = sum(1 for clip in clips if len(clip))
        return len(kept), len(kept) if group.bucket else 0, heard, tokens, labels

    def _write_pixels(self, task: Task, rows: Sequence[Row], out: NDArray[np.uint8], field: FieldSpec) -> bool:
        """Write the pictures where the task wants them; whether that is the reader's memory, which may fail it.

        The slot has them as well where the checksum is to cover them.
        """
        if self._lent and task.target and self._lent.write(task.target, rows, field):
            if task.target.hashed:
                self._lent.read(task.target, out)
            return True
        fetched = [self._lent.fetch(row, out[0]) for row in rows] if self._lent else rows
        _write_rows(out, fetched)
        return False


class _Run:
    """What one task has cost and found so far."""

    def __init__(self, task: Task, announce: Announce) -> None:
        self.task, self.announce = task, announce
        self.spares = list(task.spares)
        self.verdicts: list[Verdict] = []
        self.read_s = self.decode_s = 0.0
        self.read_bytes = 0

    def spent(self, read_s: float, decode_s: float, read_bytes: int) -> None:
        self.read_s += read_s
        self.decode_s += decode_s
        self.read_bytes += read_bytes


def views(spec: BatchSpec, payload: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """Arrays over the payload, by field name; the gaps between fields are zeroed."""
    fields: dict[str, NDArray[Any]] = {}
    end = 0
    for field in spec.fields:
        payload[end : field.offset] = 0
        end = field.offset + field.size_bytes
        fields[field.name] = payload[field.offset : end].view(field.dtype).reshape(field.shape)
    payload[end : spec.size_bytes] = 0
    return fields


def _checksum(payload: NDArray[np.uint8], spec: BatchSpec, without_pixels: bool) -> int:
    """xxh3-64, less its top bit, of the payload or of what stands before and after its pixels."""
    start = spec.pixels.offset
    end = start + spec.pixels.size_bytes if without_pixels else start
    digest = xxhash.xxh3_64(payload[:start].data)
    digest.update(payload[end : spec.size_bytes].data)
    return digest.intdigest() & ((1 << CHECKSUM_BITS) - 1)


def _write_rows(out: NDArray[Any], rows: Sequence[Any]) -> None:
    """Row i of `out` starts with rows[i]; all else in it is zero."""
    for place, row in enumerate(rows):
        if out.ndim == 2:
            out[place, : len(row)] = row
            out[place, len(row) :] = 0
        else:
            out[place] = row
    out[len(rows) :] = 0
