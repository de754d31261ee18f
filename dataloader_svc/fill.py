"""A task becomes a filled slot: read, decode, substitute, lay out. Deterministic: the same task gives the same bytes.

A picture is decoded into the row of its place in the task, of the slot or of memory that the reader lent. A sample
that fails gives its place to the first spare that decodes and whose planned tokens fit in its room; without one the
micro-batch is a sample shorter, and those behind move up. Samples that made it stand side by side from row 0; every
byte of the payload is written, because slots are used again, but for pixels that lie elsewhere.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from dataloader_svc import text
from dataloader_svc.crew import Crew
from dataloader_svc.decode import Decoder
from dataloader_svc.index import Index, Row
from dataloader_svc.lent import LentParts
from dataloader_svc.rows import DeviceRows, HostRows, Place, Rows
from dataloader_svc.sources import Waiting, is_remote
from dataloader_svc.store import Reader
from dataloader_svc.tasks import Done, Task, Timings, Verdict
from shared.batch import PIXELS, BatchSpec, Group, audio_tokens, batch_spec, groups
from shared.errors import DeviceError, SampleError
from shared.sections import DataSection

CHECKSUM_BITS = 63
CAPTION_BYTES = 1 << 12
"""Behind a picture or a clip there is its caption, as a rule."""

Announce = Callable[[int], None]
NO_CLIP = np.zeros(0, np.int16)
CONVICTED = SampleError("decoder_crash", "the decoder process dies of it")


class Encoded(msgspec.Struct, frozen=True):
    """The bytes of one sample's members, and what the index tells of it."""

    row: Row
    image: bytes
    audio: bytes
    text: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.image) + len(self.audio) + len(self.text)


class Decoded(msgspec.Struct, frozen=True):
    """One sample, ready to be laid out, but for its pixels, which are in their row. An empty clip where it has none."""

    sample_id: int
    clip: NDArray[np.int16]
    caption: list[int]


Outcome = Decoded | SampleError


class Filler:
    """Fills payloads for one worker. `index`, `reader` and `decoder` are only used, never closed.

    `lent` has the memory for pixels of tasks with a target, where the worker has a GPU.
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
        self._crew = Crew(threads, "read")

    def fill(self, task: Task, payload: NDArray[np.uint8], announce: Announce) -> Done:
        """Write the task's micro-batch into `payload` (uint8, at least the group's size) and report.

        `announce(sample_id)` is called before each decode of a careful task, and while storage keeps a read waiting.

        Raises:
            ShardError: a shard cannot be read. A stand-in would change the batch, so the task fails as a whole.
            DeviceError: the GPU cannot be used any more.
        """
        if self._lent and task.target and (rows := self._lent.rows(task.target, self._specs[task.group].pixels)):
            try:
                return self._fill(task, payload, announce, rows)
            except DeviceError as error:
                self._lent.give_up(task.target, error)
        return self._fill(task, payload, announce, None)

    def close(self) -> None:
        """Stop the threads."""
        self._crew.close()

    def _fill(self, task: Task, payload: NDArray[np.uint8], announce: Announce, lent: DeviceRows | None) -> Done:
        group, spec = self._groups[task.group], self._specs[task.group]
        fields = views(spec, payload)
        rows: Rows = lent or HostRows(fields[PIXELS])
        run = _Run(task, group, rows, announce)
        kept = dict(self._kept(run))
        started = time.perf_counter()
        rows.close_ranks(list(kept) if group.bucket else [])
        counts = self._lay_out(list(kept.values()), group, fields)
        hashed = task.target is not None and task.target.hashed
        if lent and hashed:
            lent.read(fields[PIXELS])
        checksum = _checksum(payload, spec, without_pixels=lent is not None and not hashed)
        timings = Timings(run.read_s, run.decode_s, time.perf_counter() - started)
        ids = tuple(sample.sample_id for sample in kept.values())
        planned = set(task.sample_ids)
        substituted = sum(1 for i in ids if i not in planned)
        report = Done(task.id, checksum, counts, ids, substituted, tuple(run.verdicts), timings, run.read_bytes)
        retries, fetched_bytes = self._reader.store.tally.take()
        told = {"retries": retries, "fetched_bytes": fetched_bytes, "on_device": lent is not None}
        return msgspec.structs.replace(report, **told)

    def _kept(self, run: "_Run") -> Iterator[tuple[int, Decoded]]:
        """Places of the task and their samples: the planned ones that are good, others replaced where a spare can."""
        ids = run.task.sample_ids
        for place, outcome in enumerate(self._try(ids, 0, run)):
            found = outcome if isinstance(outcome, Decoded) else self._substitute(ids[place], place, run)
            if found:
                yield place, found

    def _substitute(self, sample_id: int, place: int, run: "_Run") -> Decoded | None:
        room = self._planned_tokens(sample_id, run.group)
        for spare in [i for i in run.spares if self._planned_tokens(i, run.group) <= room]:
            run.spares.remove(spare)
            outcome = self._try([spare], place, run)[0]
            if isinstance(outcome, Decoded):
                return outcome
        return None

    def _planned_tokens(self, sample_id: int, group: Group) -> int:
        row = self._index.row(sample_id)
        return 2 + group.image_tokens + self._planned_clip_tokens(row, group) + row.text_tokens

    def _planned_clip_tokens(self, row: Row, group: Group) -> int:
        return audio_tokens(min(row.clip_samples, group.clip_samples), self._data.audio)

    def _try(self, sample_ids: Sequence[int], first: int, run: "_Run") -> list[Outcome]:
        """Decode samples to the places from `first` on, together or (careful) one after the other; verdicts go into
        `run`.
        """
        step = 1 if run.task.careful else max(1, len(sample_ids))
        outcomes: list[Outcome] = []
        for at in range(0, len(sample_ids), step):
            outcomes += self._try_together(sample_ids[at : at + step], first + at, run)
        for sample_id, outcome in zip(sample_ids, outcomes, strict=True):
            if isinstance(outcome, SampleError):
                run.verdicts.append(Verdict(sample_id, outcome.reason, outcome.detail))
        return outcomes

    def _try_together(self, sample_ids: Sequence[int], first: int, run: "_Run") -> list[Outcome]:
        wanted = [at for at, sample_id in enumerate(sample_ids) if sample_id not in run.task.skip]
        ids = [sample_ids[at] for at in wanted]
        if run.task.careful:
            for sample_id in ids:
                run.announce(sample_id)
        started = time.perf_counter()
        samples = self._read(run, ids)
        read = time.perf_counter()
        decoded = self._decode(
            ids, samples, [run.rows.place(first + at) for at in wanted if run.group.bucket], run.group
        )
        run.spent(read - started, time.perf_counter() - read, sum(sample.size_bytes for sample in samples))
        found = dict(zip(wanted, decoded, strict=True))
        return [found.get(at, CONVICTED) for at in range(len(sample_ids))]

    def _read(self, run: "_Run", sample_ids: Sequence[int]) -> list[Encoded]:
        """The samples' bytes; storage that fails is no fault of theirs, so its ShardError ends the worker.

        Local storage is told of all of them and then asked by this thread alone: threads that read what is in memory do
        little but hand the interpreter lock to each other, several times a picture. A network is asked by all threads.
        """
        rows = [self._index.row(sample_id) for sample_id in sample_ids]
        waitings = [partial(run.announce, sample_id) for sample_id in sample_ids]
        if any(is_remote(row.shard) for row in rows):
            return self._crew.map(self._encoded, rows, waitings)
        for row in rows if len(rows) > 1 else ():
            for offset, size in filter(None, (row.image, row.audio)):
                self._reader.expect(row.shard, offset, size + CAPTION_BYTES)
        return list(map(self._encoded, rows, waitings))

    def _encoded(self, row: Row, waiting: Waiting) -> Encoded:
        read, shard = self._reader.read, row.shard
        image = read(shard, *row.image, waiting) if row.image else b""
        audio = read(shard, *row.audio, waiting) if row.audio else b""
        return Encoded(row, image, audio, read(shard, *row.text, waiting) if row.text else b"")

    def _decode(
        self, ids: Sequence[int], samples: Sequence[Encoded], pixels: Sequence[Place], group: Group
    ) -> list[Outcome]:
        """Every sample with all of its modalities, or the first verdict against it; pictures go into `pixels`."""
        images: Sequence[Any] = [None] * len(samples)
        clips: Sequence[Any] = [NO_CLIP] * len(samples)
        if group.bucket:
            images = self._decoder.decode_images([sample.image for sample in samples], group.bucket, pixels)
        if group.clip_samples:
            clips = self._crew.map(partial(self._clip, group), samples)
        return [self._joined(*part) for part in zip(ids, images, clips, self._captions(samples), strict=True)]

    def _clip(self, group: Group, sample: Encoded) -> NDArray[np.int16] | SampleError:
        """The clip, no longer than the plan has room for: a header may promise fewer samples than the decoder gives.

        None at all where the plan has none: such a sample may ride in a group of samples with one.
        """
        limit = self._planned_clip_tokens(sample.row, group) * self._data.audio.samples_per_token
        return self._decoder.decode_audio(sample.audio, limit) if limit else NO_CLIP

    def _captions(self, samples: Sequence[Encoded]) -> list[list[int] | SampleError]:
        """Each caption's ids, cut to the token limit."""
        found: list[Any] = [self._words(sample) for sample in samples]
        places = [place for place, words in enumerate(found) if isinstance(words, str)]
        ids = self._tokenizer.encode_all([found[place] for place in places])
        for place, caption in zip(places, ids, strict=True):
            found[place] = caption[: self._data.text.max_tokens]
        return found

    def _words(self, sample: Encoded) -> str | SampleError:
        try:
            return text.caption(sample.text, self._data.text.bad_utf8)
        except SampleError as error:
            return error

    @staticmethod
    def _joined(sample_id: int, image: Any, clip: Any, caption: Any) -> Outcome:
        verdict = next((part for part in (image, clip, caption) if isinstance(part, SampleError)), None)
        return verdict or Decoded(sample_id, clip, caption)

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


class _Run:
    """What one task has cost and found so far."""

    def __init__(self, task: Task, group: Group, rows: Rows, announce: Announce) -> None:
        self.task, self.group, self.rows, self.announce = task, group, rows, announce
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
        end = field.end
        fields[field.name] = payload[field.offset : end].view(field.dtype).reshape(field.shape)
    payload[end : spec.size_bytes] = 0
    return fields


def _checksum(payload: NDArray[np.uint8], spec: BatchSpec, without_pixels: bool) -> int:
    """xxh3-64, less its top bit, of the payload or of what stands before and after its pixels."""
    start = spec.pixels.offset
    end = spec.pixels.end if without_pixels else start
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
