"""What a finished data set holds: written last, so that its presence says the set is whole."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from deploy.demo.shards import Shard, write_text
from shared.errors import ConfigError

Counts = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Summary:
    """Arguments, counts, and the shards with their digests."""

    arguments: dict[str, int]
    counts: Counts
    speech_duration_s: float
    bytes: int
    shards: tuple[Shard, ...]

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)


def summarize(
    arguments: dict[str, int], traits: dict[str, Iterable[str]], durations_s: Iterable[float], shards: Iterable[Shard]
) -> Summary:
    """Count every trait ("modality", "aspect" …) over the samples and total the shards."""
    shards = tuple(shards)
    counts = {trait: dict(sorted(Counter(values).items())) for trait, values in traits.items()}
    return Summary(arguments, counts, round(sum(durations_s), 3), sum(shard.bytes for shard in shards), shards)


def save(path: Path, summary: Summary) -> None:
    """Write the summary; it appears only when whole."""
    write_text(path, json.dumps(asdict(summary), indent=2) + "\n")


def load(path: Path) -> Summary | None:
    """The summary at `path`; None where there is none or it is not one."""
    try:
        fields = json.loads(path.read_text("utf-8"))
        shards = tuple(Shard(**shard) for shard in fields.pop("shards"))
        return Summary(shards=shards, **fields)
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return None


def find_finished(path: Path, arguments: dict[str, int], force: bool) -> Summary | None:
    """The summary of a finished set built with `arguments`; refuses to replace another set unless forced."""
    summary = None if force else load(path)
    if summary is None:
        return None
    if summary.arguments != arguments:
        rule = f"holds a set built with {_text(summary.arguments)}, not {_text(arguments)}"
        raise ConfigError("OUT_DIR", path.parent, rule, "choose another directory, or pass --force to replace that set")
    return summary if all(_is_whole(path.parent, shard) for shard in summary.shards) else None


def prepare(path: Path, pattern: str, keep: Iterable[str]) -> None:
    """Make the directory and remove what an earlier or interrupted build left: its summary and surplus shards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    for surplus in {shard.name for shard in path.parent.glob(pattern)} - set(keep):
        (path.parent / surplus).unlink()


def to_table(summary: Summary, title: str) -> Table:
    """The summary for a terminal."""
    table = Table("what", "kind", "count", title=title)
    table.columns[2].justify = "right"
    for trait, counts in summary.counts.items():
        for kind, count in counts.items():
            table.add_row(trait, kind, str(count))
            trait = ""
        table.add_section()
    table.add_row("samples", "", str(summary.samples))
    table.add_row("shards", "", str(len(summary.shards)))
    table.add_row("speech", "seconds", f"{summary.speech_duration_s:.1f}")
    table.add_row("size", "MB", f"{summary.bytes / 1e6:.1f}")
    return table


def _is_whole(out_dir: Path, shard: Shard) -> bool:
    path = out_dir / shard.name
    return path.is_file() and path.stat().st_size == shard.bytes


def _text(arguments: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items())
