"""The index of a whole run: sample id i is row i of all shards in order, bad samples included, so ids never move.

Everything stays in the memory-mapped files (`index_file`), which `build` makes (`indexing`), until someone asks for a
column: then the five that planning needs are in memory, 21 bytes a sample, for as long as somebody holds them.
"""

import hashlib
import threading
import weakref
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataloader_svc.bucket import Columns
from dataloader_svc.index_file import Header, IndexFile, index_path, read
from dataloader_svc.indexing import BuildReport, build, rules_digest
from dataloader_svc.samples import REASONS
from dataloader_svc.shards import ASK_THREADS, Shard
from dataloader_svc.sources import Fingerprint, is_remote
from dataloader_svc.store import Store
from dataloader_svc.text import Tokenizer
from shared.errors import ShardError
from shared.sections import DataSection

__all__ = ["BuildReport", "Index", "Problem", "Row", "build"]

MAX_OPEN = 256
Span = tuple[int, int]
Array = npt.NDArray[Any]


class Row(msgspec.Struct, frozen=True):
    """One sample. Spans are (offset, size) in bytes of the shard, None without that modality.

    `height` and `width` are pixels as shown, `frames` and `rate_hz` the clip's as declared, `tokens` the caption's,
    uncut. `clip_samples` and `text_tokens` are what planning counts with. `reason` is "good" or why the sample is not
    trained on.
    """

    shard: str
    dataset: str
    key: str
    image: Span | None
    audio: Span | None
    text: Span | None
    height: int
    width: int
    frames: int
    rate_hz: int
    channels: int
    characters: int
    tokens: int
    clip_samples: int
    text_tokens: int
    reason: str


class Problem(msgspec.Struct, frozen=True):
    """Something wrong with a shard (`key` is then empty) or one of its samples."""

    shard: str
    key: str
    reason: str
    detail: str


class Index:
    """Facts of every sample of a run. Open one with `Index.open`; safe to share between threads."""

    def __init__(
        self, shards: Sequence[Shard], paths: Sequence[Path], headers: Sequence[Header], data: DataSection
    ) -> None:
        self.shards, self._paths, self._headers, self._data = tuple(shards), tuple(paths), tuple(headers), data
        self._starts = list(accumulate((header.rows for header in headers), initial=0))
        self._lock = threading.Lock()
        self._files: OrderedDict[int, IndexFile] = OrderedDict()
        self._columns: weakref.ref[Columns] | None = None

    @classmethod
    def open(
        cls,
        shards: Sequence[Shard],
        data: DataSection,
        index_dir: Path | None,
        store: Store | None = None,
        ask: bool = True,
    ) -> "Index":
        """The index of `shards` in their order.

        Without `ask` remote shards are not held against their index here: whoever reads them must, by `fingerprints`.

        Raises:
            ShardError: an index is missing, damaged, older than its shard, or built under other settings.
            ConfigError: the tokenizer cannot be loaded.
        """
        tokenizer, rules = Tokenizer.load(data.text.tokenizer).digest, rules_digest(data)
        paths = [index_path(shard.path, index_dir) for shard in shards]
        fresh = partial(_fresh, store or Store(), rules, tokenizer, ask)
        with ThreadPoolExecutor(ASK_THREADS, "ask") as pool:
            headers = list(pool.map(fresh, shards, paths))
        return cls(shards, paths, headers, data)

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def facts(self) -> Columns:
        """The columns, read from the files unless somebody still holds them.

        Raises:
            ShardError: an index changed since it was opened, or holds what none can.
        """
        with self._lock:
            held = self._columns() if self._columns else None
            if held is None:
                parts = [_columns(self._read(n), self._data) for n in range(len(self.shards))]
                held = _joined(parts, self.dataset_starts)
                self._columns = weakref.ref(held)
            return held

    @property
    def digest(self) -> str:
        """Hex digits that two indexes share when their samples, in order, and what is known of them are the same."""
        text = msgspec.msgpack.encode([(s.dataset, h) for s, h in zip(self.shards, self._headers, strict=True)])
        return hashlib.blake2b(text, digest_size=16).hexdigest()

    @property
    def content(self) -> str:
        """Hex digits that two indexes share when their shards, in order, hold the same samples, judged and counted
        alike, wherever they lie and whenever they were written."""
        told = [(s.dataset, h.content, h.rules, h.tokenizer) for s, h in zip(self.shards, self._headers, strict=True)]
        return hashlib.blake2b(msgspec.msgpack.encode(told), digest_size=8).hexdigest()

    @property
    def fingerprints(self) -> dict[str, Fingerprint]:
        """What each shard was indexed as, by path."""
        return {shard.path: header.fingerprint for shard, header in zip(self.shards, self._headers, strict=True)}

    @property
    def dataset_starts(self) -> tuple[int, ...]:
        """The first sample id of each dataset, in the order of the data section, and len(self) at the end."""
        counts = {dataset.name: 0 for dataset in self._data.datasets}
        for shard, header in zip(self.shards, self._headers, strict=True):
            counts[shard.dataset] += header.rows
        return tuple(accumulate(counts.values(), initial=0))

    @property
    def height(self) -> Array:
        """Pixels as shown, 0 without an image. uint32 [I]."""
        return self.facts.height

    @property
    def width(self) -> Array:
        """Pixels as shown, 0 without an image. uint32 [I]."""
        return self.facts.width

    @property
    def clip_samples(self) -> Array:
        """Clip length at the common rate, rounded up, 0 without audio. int64 [I]."""
        return self.facts.clip_samples

    @property
    def text_tokens(self) -> Array:
        """Caption tokens, cut to data.text.max_tokens. uint32 [I]."""
        return self.facts.text_tokens

    @property
    def verdict(self) -> Array:
        """0 where the sample is good, else its reason's place in `samples.REASONS`. uint8 [I]."""
        return self.facts.verdict

    def row(self, sample_id: int) -> Row:
        """One sample's place and facts.

        Raises:
            IndexError: there is no such sample.
        """
        shard, number = self._find(sample_id)
        place, file = self.shards[shard], self._file(shard)
        at = file.row(number)
        return Row(
            place.path,
            place.dataset,
            file.key(at),
            _span(at.image_offset, at.image_size),
            _span(at.audio_offset, at.audio_size),
            _span(at.text_offset, at.text_size),
            at.height,
            at.width,
            at.frames,
            at.rate_hz,
            at.channels,
            at.characters,
            at.tokens,
            _clip_samples(at.frames, at.rate_hz, self._data),
            min(at.tokens, self._data.text.max_tokens),
            REASONS[at.verdict],
        )

    def name(self, sample_id: int) -> str:
        """`dataset/shard's name/key`: what people and logs call a sample."""
        shard, number = self._find(sample_id)
        place, file = self.shards[shard], self._file(shard)
        return f"{place.dataset}/{Path(place.path).name}/{file.key(file.row(number))}"

    def problems(self) -> list[Problem]:
        """Everything found wrong, shard by shard."""
        return [
            Problem(shard.path, note.key, note.reason, note.detail)
            for number, shard in enumerate(self.shards)
            for note in self._file(number).problems()
        ]

    def counts(self) -> dict[str, int]:
        """How many problems of each reason there are."""
        return dict(Counter(problem.reason for problem in self.problems()))

    def _find(self, sample_id: int) -> tuple[int, int]:
        if not 0 <= sample_id < len(self):
            raise IndexError(f"sample {sample_id} of {len(self)}")
        shard = bisect_right(self._starts, sample_id) - 1
        return shard, sample_id - self._starts[shard]

    def _file(self, shard: int) -> IndexFile:
        with self._lock:
            if shard not in self._files:
                self._files[shard] = self._read(shard)
            self._files.move_to_end(shard)
            if len(self._files) > MAX_OPEN:
                self._files.popitem(last=False)
            return self._files[shard]

    def _read(self, shard: int) -> IndexFile:
        file = read(self._paths[shard])
        if file is None or file.header != self._headers[shard]:
            raise ShardError(f"the index of {self.shards[shard].path} changed while in use; start again")
        return file


def _fresh(store: Store, rules: str, tokenizer: str, ask: bool, shard: Shard, path: Path) -> Header:
    """The header of the shard's index file, if it can be trusted.

    Raises:
        ShardError: it cannot; the text says why and what to run.
    """
    file, again = read(path), "run `millstream-loader index --config ...`"
    if file is None:
        raise ShardError(f"shard {shard.path} has no index at {path}; {again}")
    if (ask or not is_remote(shard.path)) and file.header.fingerprint != store.fingerprint(shard.path):
        raise ShardError(f"the index of {shard.path} is older than its tar; {again} again")
    if file.header.rules != rules:
        raise ShardError(f"the index of {shard.path} was built under other data limits; {again} again")
    if file.header.tokenizer != tokenizer:
        raise ShardError(f"the index of {shard.path} was built for another tokenizer; {again} again")
    return file.header


def _columns(file: IndexFile, data: DataSection) -> Columns:
    rows, most = file.rows, np.uint32(data.text.max_tokens)
    if len(rows) and int(rows["verdict"].max()) >= len(REASONS):
        raise ShardError(f"an index of {len(rows)} samples holds a verdict that is none; remove it and index again")
    clip_I = _clip_samples(rows["frames"].astype(np.int64), rows["rate_hz"].astype(np.int64), data)
    text_I = np.minimum(rows["tokens"], most)
    return Columns(rows["height"].copy(), rows["width"].copy(), clip_I, text_I, rows["verdict"].copy())


def _span(offset: int, size: int) -> Span | None:
    return (offset, size) if offset else None


def _clip_samples(frames: Any, rate_hz: Any, data: DataSection) -> Any:
    """ceil(frames x common rate / own rate), of one row or of many; a row without audio has neither."""
    return -(-frames * data.audio.rate_hz // (rate_hz + (rate_hz == 0)))


def _joined(parts: Sequence[Columns], dataset_starts: tuple[int, ...]) -> Columns:
    fields = ("height", "width", "clip_samples", "text_tokens", "verdict")
    arrays = {field: np.concatenate([getattr(part, field) for part in parts]) for field in fields}
    return Columns(**arrays, dataset_starts=dataset_starts)
