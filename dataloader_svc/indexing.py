"""Building index files: one pass over a shard, header facts of every member, a verdict for every sample.

A verdict depends on limits of the data section (`rules` digests them) and the token column on the tokenizer; a file
whose limits changed is built anew, one where only the tokenizer changed gets a new token column.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataloader_svc.headers import audio_info, image_size
from dataloader_svc.index_file import ROW, VERSION, Header, IndexFile, Note, index_path, read, write
from dataloader_svc.samples import VERDICTS, Sample, group
from dataloader_svc.shards import Fingerprint, Member, Reader, Shard, fingerprint, scan
from dataloader_svc.text import Tokenizer, caption
from shared.errors import SampleError, ShardError
from shared.sections import DataSection

MAX_MEDIA_BYTES = 1 << 29
MAX_TEXT_BYTES = 1 << 20

# A note about a good sample: its caption held bytes that are not UTF-8 and now holds U+FFFD.
REPLACED = "replaced_utf8"


class BuildReport(msgspec.Struct, frozen=True):
    """What `build` did, in shards; and what it knows, in samples. `counts` are problems by reason."""

    built: int
    retokenized: int
    reused: int
    samples: int
    good: int
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
) -> BuildReport:
    """Make every index of `shards` present and fresh, in `jobs` threads; `progress(done, of)` after each shard.

    Raises:
        ShardError: a shard cannot be read or changes meanwhile, or an index cannot be written.
        ConfigError: the tokenizer cannot be loaded.
    """
    builder = _Builder(data, index_dir)
    paths = list(dict.fromkeys(shard.path for shard in shards))
    actions: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    samples = good = 0
    with ThreadPoolExecutor(jobs, "index") as pool:
        futures = [pool.submit(builder.refresh, path) for path in paths]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                action, file = future.result()
                actions[action] += 1
                counts.update(note.reason for note in file.problems())
                samples, good = samples + len(file.rows), good + int((file.rows["verdict"] == 0).sum())
                if progress:
                    progress(done, len(paths))
        finally:
            pool.shutdown(cancel_futures=True)
            builder.reader.close()
    return BuildReport(actions["built"], actions["retokenized"], actions["reused"], samples, good, dict(counts))


class _Builder:
    """Builds one file at a time; shared by the threads."""

    def __init__(self, data: DataSection, index_dir: Path | None) -> None:
        self.data, self.index_dir = data, index_dir
        self.rules, self.tokenizer, self.reader = rules_digest(data), Tokenizer.load(data.text.tokenizer), Reader()

    def refresh(self, shard: str) -> tuple[str, IndexFile]:
        """Leave a fresh file for `shard`; what was done, and the file."""
        path, now = index_path(shard, self.index_dir), fingerprint(shard)
        old = _usable(path, now, self.rules)
        if old and old.header.tokenizer == self.tokenizer.digest:
            return "reused", old
        if old:
            self._write(path, now, self._recount(shard, old), bytes(old.keys), old.problems())
        else:
            self._write(path, now, *self._survey(shard))
        if fingerprint(shard) != now:
            path.unlink(missing_ok=True)
            raise ShardError(f"shard {shard} changed while it was indexed; run index again when it is written")
        file = read(path)
        if file is None:
            raise ShardError(f"index {path} vanished after it was written; run index again")
        return ("retokenized" if old else "built"), file

    def _write(self, path: Path, at: Fingerprint, rows: npt.NDArray[Any], keys: bytes, notes: list[Note]) -> None:
        problems = msgspec.msgpack.encode(notes)
        header = Header(VERSION, at, self.rules, self.tokenizer.digest, len(rows), len(keys), len(problems))
        write(path, header, rows, keys, problems)

    def _survey(self, shard: str) -> tuple[npt.NDArray[Any], bytes, list[Note]]:
        samples, problems = group(scan(shard))
        rows, keys = np.zeros(len(samples), ROW), bytearray()
        notes = [Note("", p.reason, f"{p.detail} (at byte {p.offset})") for p in problems]
        for row, sample in zip(rows, samples, strict=True):
            key = sample.key.encode("utf-8", "surrogateescape")
            row["key_offset"], row["key_size"] = len(keys), len(key)
            keys += key
            notes += self._judge(shard, sample, row)
        return rows, bytes(keys), notes

    def _judge(self, shard: str, sample: Sample, row: Any) -> list[Note]:
        """Fill a row. A sample that is already bad is not read."""
        notes: list[Note] = []
        label = sample.key.encode("utf-8", "replace").decode()
        if not sample.reason:
            try:
                replaced = self._measure(shard, sample, row)
                notes += [Note(label, REPLACED, f"{replaced} characters")] if replaced else []
            except SampleError as error:
                sample.spoil(error.reason, error.detail)
        if sample.reason:
            row["verdict"] = VERDICTS[sample.reason]
            notes.append(Note(label, sample.reason, sample.detail.encode("utf-8", "replace").decode()))
        return notes

    def _measure(self, shard: str, sample: Sample, row: Any) -> int:
        """Facts of a sample's members into its row; how many characters of its caption had to be replaced."""
        for name, member in (("image", sample.image), ("audio", sample.audio), ("text", sample.text)):
            if member:
                row[f"{name}_offset"], row[f"{name}_size"] = member.offset, member.size
        if sample.image:
            row["height"], row["width"] = image_size(self._bytes(shard, sample.image), self.data.image)
        if sample.audio:
            facts = audio_info(self._bytes(shard, sample.audio), self.data.audio)
            row["frames"], row["rate_hz"], row["channels"] = facts
        assert sample.text is not None
        data = self._bytes(shard, sample.text, MAX_TEXT_BYTES)
        text = caption(data, self.data.text.bad_utf8)
        row["characters"], row["tokens"] = len(text), self.tokenizer.count(text)
        return text.count("\ufffd") - data.count("\ufffd".encode())

    def _recount(self, shard: str, old: IndexFile) -> npt.NDArray[Any]:
        rows = old.rows.copy()
        for number in np.flatnonzero(rows["verdict"] == 0):
            data = self.reader.read(shard, int(rows["text_offset"][number]), int(rows["text_size"][number]))
            rows["tokens"][number] = self.tokenizer.count(caption(data, self.data.text.bad_utf8))
        return rows

    def _bytes(self, shard: str, member: Member, limit: int = MAX_MEDIA_BYTES) -> bytes:
        if member.size > limit:
            raise SampleError("member_too_large", f"{member.name} has {member.size} bytes, over {limit}")
        return self.reader.read(shard, member.offset, member.size)


def _usable(path: Path, now: Fingerprint, rules: str) -> IndexFile | None:
    try:
        file = read(path)
    except ShardError:
        return None
    return file if file and file.header.fingerprint == now and file.header.rules == rules else None
