"""WebDataset's grouping rule: which members make one sample, and why some samples are none.

A member's key is its path up to the FIRST dot of the basename; the rest, lower-cased, is its field: `a/22.05.png` has
key `a/22` and field `05.png`. Adjacent members of one key are one sample. Names without a dot, or whose basename
starts with one, belong to no sample. Fields:

=========  =========================================================================================
image      jpg jpeg png webp (one at most); gif avif bmp tif tiff heic jp2 are counted rejects
audio      wav flac ogg opus mp3 (one at most); m4a aac wma are counted rejects
text       txt (exactly one)
ignored    json jsonl cls cls2 id index inx url meta csv xml yaml yml md5 sha256 npy npz pt pth pkl pickle pyd:
           known side members, never opened
=========  =========================================================================================

Any other field makes its sample bad: a silent merge or loss of members is worse than a missing sample.
"""

from collections.abc import Iterable

import msgspec

from dataloader_svc.shards import Member, ScanProblem

IMAGE = frozenset({"jpg", "jpeg", "png", "webp"})
AUDIO = frozenset({"wav", "flac", "ogg", "opus", "mp3"})
TEXT = frozenset({"txt"})
UNSUPPORTED = frozenset({"gif", "avif", "bmp", "tif", "tiff", "heic", "jp2", "m4a", "aac", "wma"})
IGNORED = frozenset(
    {"json", "jsonl", "cls", "cls2", "id", "index", "inx", "url", "meta", "csv", "xml", "yaml", "yml", "md5", "sha256"}
    | {"npy", "npz", "pt", "pth", "pkl", "pickle", "pyd"}
)

# A verdict is a place in this tuple; it is stored in index files, so new reasons go at the end.
REASONS = (
    "good",
    "unknown_field",
    "duplicate_member",
    "ambiguous_member",
    "unsorted_key",
    "missing_text",
    "truncated_tail",
    "link_member",
    "unsafe_name",
    "special_member",
    "member_too_large",
    "unsupported_format",
    "junk_image",
    "truncated_image",
    "image_too_large",
    "odd_ratio",
    "junk_audio",
    "empty_audio",
    "audio_too_long",
    "bad_utf8",
)
VERDICTS = {reason: code for code, reason in enumerate(REASONS)}


class Sample(msgspec.Struct):
    """The members of one key. `reason` is empty while nothing is wrong with it."""

    key: str
    image: Member | None = None
    audio: Member | None = None
    text: Member | None = None
    reason: str = ""
    detail: str = ""
    fields: tuple[str, ...] = ()

    def spoil(self, reason: str, detail: str) -> None:
        """Mark the sample bad; the first reason stays."""
        if not self.reason:
            self.reason, self.detail = reason, detail

    def add(self, field: str, member: Member) -> None:
        """Put a member in its place, or spoil the sample."""
        if member.reject:
            self.spoil(member.reject, f"member {member.name}")
        elif field in self.fields:
            self.spoil("duplicate_member", f"field {field} twice, the second at byte {member.offset}")
        elif field in UNSUPPORTED:
            self.spoil("unsupported_format", f"field {field}")
        elif field not in IGNORED:
            self._fill(field, member)
        self.fields += (field,)

    def _fill(self, field: str, member: Member) -> None:
        for name, known in (("image", IMAGE), ("audio", AUDIO), ("text", TEXT)):
            if field in known:
                if getattr(self, name):
                    self.spoil("ambiguous_member", f"fields {', '.join((*self.fields, field))}: more than one {name}")
                setattr(self, name, member)
                return
        self.spoil("unknown_field", f"unknown field {field} (the key ends at the first dot of the name)")


def split(name: str) -> tuple[str, str]:
    """Key and field of a member name; both empty when it belongs to no sample.

    >>> split("a.b/22.05.PNG")
    ('a.b/22', '05.png')
    >>> split("._x.jpg")
    ('', '')
    """
    folder, slash, base = name.rpartition("/")
    stem, dot, field = base.partition(".")
    return (folder + slash + stem, field.lower()) if stem and dot and field else ("", "")


def group(walk: Iterable[Member | ScanProblem]) -> tuple[list[Sample], list[ScanProblem]]:
    """Samples of one shard in order of first appearance, good and bad, and what is wrong with the shard.

    A key that comes back later makes one bad sample: halves are never trained.
    """
    found: dict[str, Sample] = {}
    problems: list[ScanProblem] = []
    last = ""
    for item in walk:
        if isinstance(item, ScanProblem):
            problems.append(item)
            continue
        key, field = split(item.name)
        if not key:
            continue
        if key in found and key != last:
            found[key].reason, found[key].detail = "unsorted_key", "its members are not adjacent: sort the tar by name"
        sample = found.setdefault(key, Sample(key))
        sample.add(field, item)
        last = key
    samples = list(found.values())
    for problem in problems:
        _distrust_tail(samples, problem)
    for sample in samples:
        if sample.text is None:
            sample.spoil("missing_text", f"fields {', '.join(sample.fields)}: no txt")
    return samples, problems


def _distrust_tail(samples: list[Sample], problem: ScanProblem) -> None:
    """Spoil the last sample where the walk broke off inside it.

    Where the next member's name is unknown, a last sample with fewer fields than the one before is taken for cut.
    """
    if not samples or problem.reason not in ("truncated_tail", "bad_header", "no_end_marker"):
        return
    last, before = samples[-1], samples[-2] if len(samples) > 1 else samples[-1]
    inside = split(problem.name)[0] == last.key if problem.name else set(last.fields) < set(before.fields)
    if inside:
        last.spoil("truncated_tail", f"the shard breaks off at byte {problem.offset}")
