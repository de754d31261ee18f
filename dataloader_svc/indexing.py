"""Building index files: one pass over a shard, header facts of every member, a verdict for every sample.

Members are measured as the walk comes by, so a remote shard is fetched once and its media are never held together. The
same pass hashes what training would see of them (`Header.content`).

A verdict depends on limits of the data section (`rules` digests them) and the token column on the tokenizer; a file
whose limits changed is built anew, one where only the tokenizer changed gets a new token column.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from dataloader_svc.headers import audio_info, image_size
from dataloader_svc.index_file import ROW, VERSION, Header, IndexFile, Note, index_path, read, write
from dataloader_svc.samples import AUDIO, IMAGE, TEXT, VERDICTS, Sample, group, split
from dataloader_svc.shards import Member, ScanProblem, Shard, walk
from dataloader_svc.sources import Fingerprint, Source
from dataloader_svc.store import Store
from dataloader_svc.text import Tokenizer, caption
from shared.errors import SampleError, ShardError
from shared.sections import DataSection

MAX_MEDIA_BYTES = 1 << 29
MAX_TEXT_BYTES = 1 << 20

MEASURED = IMAGE | AUDIO | TEXT
COLUMNS = {"image": ("height", "width"), "audio": ("frames", "rate_hz", "channels"), "text": ("characters", "tokens")}
Facts = tuple[int, ...]
"""Of an image height and width, of a clip frames, rate and channels, of a caption characters, tokens, replaced ones."""

# A note about a good sample: its caption held bytes that are not UTF-8 and now holds U+FFFD.
REPLACED = "replaced_utf8"
REPLACED_AT = 2


class BuildReport(msgspec.Struct, frozen=True):
    """What `build` did, in shards; how many samples they hold, and the problems by reason."""

    built: int
    retokenized: int
    reused: int
    samples: int
    counts: dict[str, int]


def rules_digest(data: DataSection) -> str:
    """Digest of every setting that decides a verdict."""
    rules = (VERSION, data.image.max_ratio, data.image.max_pixels, data.audio.max_s, data.text.bad_utf8)
    return hashlib.sha256(repr(rules).encode()).hexdigest()[:16]


def build(
    shards: Sequence[Shard],
    data: DataSection,
    index_dir: Path | None,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
    store: Store | None = None,
) -> BuildReport:
    """Make every index of `shards` present and fresh, in `jobs` threads; `progress(done, of)`, in bytes, on the way.

    Raises:
        ShardError: a shard cannot be read or changes meanwhile, or an index cannot be written.
        ConfigError: the tokenizer cannot be loaded.
    """
    paths = list(dict.fromkeys(shard.path for shard in shards))
    builder = _Builder(data, index_dir, store or Store(), len(paths), progress)
    actions: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    samples = 0
    with ThreadPoolExecutor(jobs, "index") as pool:
        futures = [pool.submit(builder.refresh, path) for path in paths]
        try:
            for future in as_completed(futures):
                action, file = future.result()
                actions[action] += 1
                counts.update(note.reason for note in file.problems())
                samples += len(file.rows)
        finally:
            pool.shutdown(cancel_futures=True)
    return BuildReport(actions["built"], actions["retokenized"], actions["reused"], samples, dict(counts))


class _Progress:
    """Bytes passed, over all threads. The whole is known once every shard was asked for its size: until then it is
    reckoned from those that were."""

    def __init__(self, shards: int, report: Callable[[int, int], None] | None) -> None:
        self._shards, self._report = shards, report
        self._lock = threading.Lock()
        self._done = self._known_bytes = self._known = 0

    def begin(self, size_bytes: int) -> None:
        """One more shard's size is known."""
        with self._lock:
            self._known, self._known_bytes = self._known + 1, self._known_bytes + size_bytes

    def add(self, size_bytes: int) -> None:
        """So many bytes more are done."""
        with self._lock:
            self._done += size_bytes
            if self._report:
                self._report(self._done, self._known_bytes * self._shards // max(1, self._known))


class _Builder:
    """Builds one file at a time; shared by the threads."""

    def __init__(
        self,
        data: DataSection,
        index_dir: Path | None,
        store: Store,
        shards: int,
        report: Callable[[int, int], None] | None,
    ) -> None:
        self.data, self.index_dir, self.store = data, index_dir, store
        self.rules, self.tokenizer = rules_digest(data), Tokenizer.load(data.text.tokenizer)
        self.progress = _Progress(shards, report)

    def refresh(self, shard: str) -> tuple[str, IndexFile]:
        """Leave a fresh file for `shard`; what was done, and the file."""
        path = index_path(shard, self.index_dir)
        with closing(self.store.stream(shard)) as source:
            now = source.fingerprint()
            self.progress.begin(source.size)
            old = _usable(path, now, self.rules)
            if old and old.header.tokenizer == self.tokenizer.digest:
                self.progress.add(source.size)
                return "reused", old
            if old:
                self._write(path, now, self._recount(source, old), bytes(old.keys), old.problems(), old.header.content)
            else:
                self._write(path, now, *self._survey(source))
        if self.store.fingerprint(shard) != now:
            path.unlink(missing_ok=True)
            raise ShardError(f"shard {shard} changed while it was indexed; run index again when it is written")
        file = read(path)
        if file is None:
            raise ShardError(f"index {path} vanished after it was written; run index again")
        return ("retokenized" if old else "built"), file

    def _write(
        self, path: Path, at: Fingerprint, rows: npt.NDArray[Any], keys: bytes, notes: list[Note], content: str
    ) -> None:
        problems = msgspec.msgpack.encode(notes)
        header = Header(VERSION, at, self.rules, self.tokenizer.digest, content, len(rows), len(keys), len(problems))
        write(path, header, rows, keys, problems)

    def _survey(self, source: Source) -> tuple[npt.NDArray[Any], bytes, list[Note], str]:
        facts: dict[int, Facts | SampleError] = {}
        content = xxhash.xxh3_128()
        samples, problems = group(self._measured(source, facts, content))
        rows, keys = np.zeros(len(samples), ROW), bytearray()
        notes = [Note("", p.reason, f"{p.detail} (at byte {p.offset})") for p in problems]
        for row, sample in zip(rows, samples, strict=True):
            key = sample.key.encode("utf-8", "surrogateescape")
            row["key_offset"], row["key_size"] = len(keys), len(key)
            keys += key
            notes += _judge(sample, facts, row)
        content.update(rows["verdict"].tobytes())
        return rows, bytes(keys), notes, content.hexdigest()

    def _measured(
        self, source: Source, facts: dict[int, "Facts | SampleError"], content: xxhash.xxh3_128
    ) -> Iterator[Member | ScanProblem]:
        """The walk, with the facts of each image, clip and caption left in `facts` under its offset, and all names and
        these members' bytes in `content`."""
        passed = 0
        for item in walk(source):
            if isinstance(item, Member):
                field = split(item.name)[1]
                content.update(item.name.encode("utf-8", "surrogateescape") + b"\0")
                if not item.reject and field in MEASURED:
                    facts[item.offset] = self._facts(source, item, field, content)
                self.progress.add(item.offset + item.size - passed)
                passed = item.offset + item.size
            yield item
        self.progress.add(source.size - passed)

    def _facts(self, source: Source, member: Member, field: str, content: xxhash.xxh3_128) -> "Facts | SampleError":
        limit = MAX_TEXT_BYTES if field in TEXT else MAX_MEDIA_BYTES
        if member.size > limit:
            return SampleError("member_too_large", f"{member.name} has {member.size} bytes, over {limit}")
        data = source.read(member.offset, member.size)
        content.update(member.size.to_bytes(8, "little"))
        content.update(data)
        try:
            if field in IMAGE:
                return image_size(data, self.data.image)
            return audio_info(data, self.data.audio) if field in AUDIO else self._text_facts(data)
        except SampleError as error:
            return error

    def _text_facts(self, data: bytes) -> Facts:
        """Characters and tokens of a caption, and how many of its characters had to be replaced."""
        text = caption(data, self.data.text.bad_utf8)
        return len(text), self.tokenizer.count(text), text.count("\ufffd") - data.count("\ufffd".encode())

    def _recount(self, source: Source, old: IndexFile) -> npt.NDArray[Any]:
        rows, good = old.rows.copy(), np.flatnonzero(old.rows["verdict"] == 0)
        for number in good:
            data = source.read(int(rows["text_offset"][number]), int(rows["text_size"][number]))
            rows["tokens"][number] = self.tokenizer.count(caption(data, self.data.text.bad_utf8))
        self.progress.add(source.size)
        return rows


def _judge(sample: Sample, facts: Mapping[int, Facts | SampleError], row: Any) -> list[Note]:
    """Fill a row: places and facts of the members of a good sample, or the verdict against a bad one."""
    notes: list[Note] = []
    label = sample.key.encode("utf-8", "replace").decode()
    if not sample.reason and (replaced := _fill(sample, facts, row)):
        notes.append(Note(label, REPLACED, f"{replaced} characters"))
    if sample.reason:
        row["verdict"] = VERDICTS[sample.reason]
        notes.append(Note(label, sample.reason, sample.detail.encode("utf-8", "replace").decode()))
    return notes


def _fill(sample: Sample, facts: Mapping[int, Facts | SampleError], row: Any) -> int:
    """A row's places and facts, or `sample` spoilt; how many characters of its caption were replaced."""
    replaced = 0
    for name, columns in COLUMNS.items():
        member = getattr(sample, name)
        if member is None:
            continue
        row[f"{name}_offset"], row[f"{name}_size"] = member.offset, member.size
        found = facts[member.offset]
        if isinstance(found, SampleError):
            sample.spoil(found.reason, found.detail)
            return 0
        for column, value in zip(columns, found, strict=False):
            row[column] = value
        replaced = found[REPLACED_AT] if name == "text" else 0
    return replaced


def _usable(path: Path, now: Fingerprint, rules: str) -> IndexFile | None:
    try:
        file = read(path)
    except ShardError:
        return None
    return file if file and file.header.fingerprint == now and file.header.rules == rules else None
