"""Builds the larger optional set: Tux Paint's stamps, drawings and photographs with captions and recorded speech.

They come from Debian's package `tuxpaint-stamps-default` (GPL-2), fetched with apt-get and unpacked without installing.
A stamp gives one sample per language in which it is spoken, captioned in that language; a silent stamp gives one with
its English caption.
"""

import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import soundfile
from rich.console import Console

from deploy.demo.shards import Shard, write_shard
from deploy.demo.summary import Summary, find_finished, prepare, save, summarize
from shared.errors import ConfigError

PACKAGE = "tuxpaint-stamps-default"
STAMPS_DIR = "usr/share/tuxpaint/stamps"
RECIPE = 1  # raise it when equal arguments give other bytes than before
SPEECH_SUFFIX = {"en": "_desc.ogg", "es": "_desc_es.ogg"}
CAPTION_PREFIX = {"en": "", "es": "es.utf8="}


@dataclass(frozen=True)
class Stamp:
    """A picture, its caption in one language, and the caption spoken, where it is."""

    image: Path
    caption: str
    language: str
    audio: Path | None


def build(out_dir: Path, shards: int = 8, seed: int = 0, progress: bool = True, force: bool = False) -> Summary:
    """Build `stamps-*.tar` and its summary under `out_dir`, or return at once where they are there already."""
    arguments = {"shards": shards, "seed": seed, "recipe": RECIPE}
    console, path = Console(quiet=not progress), out_dir / "STAMPS_SUMMARY.json"
    finished = find_finished(path, arguments, force)
    if finished:
        console.print(f"{out_dir} already holds the stamps; pass --force to build them again")
        return finished
    with tempfile.TemporaryDirectory(prefix="stamps-") as work_dir:
        console.print(f"fetching {PACKAGE} with apt-get, about 160 MB")
        summary = _build(out_dir, collect(fetch(Path(work_dir))), arguments)
    save(path, summary)
    console.print(f"built {summary.bytes / 1e6:.1f} MB of stamps")
    return summary


def fetch(work_dir: Path) -> Path:
    """Download and unpack the package under `work_dir`; the directory of its stamps."""
    _run("apt-get", "download", PACKAGE, cwd=work_dir)
    package = next(work_dir.glob(f"{PACKAGE}_*.deb"))
    _run("dpkg", "-x", package.name, ".", cwd=work_dir)
    return work_dir / STAMPS_DIR


def collect(stamps_dir: Path) -> list[Stamp]:
    """Every captioned picture under `stamps_dir`, in the order of their names."""
    images = sorted(stamps_dir.rglob("*.png"))
    return [stamp for image in images if image.with_suffix(".txt").is_file() for stamp in _read(image)]


def _read(image: Path) -> list[Stamp]:
    """The stamp in every language in which it is spoken; in English where it is not."""
    lines = image.with_suffix(".txt").read_text("utf-8").splitlines()
    spoken = []
    for language, suffix in SPEECH_SUFFIX.items():
        audio = image.with_name(image.stem + suffix)
        caption = _caption(lines, language)
        if caption and audio.is_file():
            spoken.append(Stamp(image, caption, language, audio))
    return spoken or [Stamp(image, _caption(lines, "en"), "en", None)]


def _caption(lines: list[str], language: str) -> str:
    """The first line is English; later ones read `es.utf8=caption`. Empty where the language is missing."""
    if language == "en":
        return lines[0].strip()
    prefix = CAPTION_PREFIX[language]
    return next((line.removeprefix(prefix).strip() for line in lines[1:] if line.startswith(prefix)), "")


def _build(out_dir: Path, stamps: list[Stamp], arguments: dict[str, int]) -> Summary:
    shards, mixed = arguments["shards"], Random(f"stamps {arguments['seed']}").sample(stamps, len(stamps))
    names = [f"stamps-{index:06d}.tar" for index in range(shards)]
    prepare(out_dir / "STAMPS_SUMMARY.json", "stamps-??????.tar", keep=names)
    written: list[Shard] = []
    for index, name in enumerate(names):
        start, stop = len(mixed) * index // shards, len(mixed) * (index + 1) // shards
        written.append(write_shard(out_dir / name, _members(mixed[start:stop], start)))
    durations_s = (soundfile.info(stamp.audio).duration for stamp in stamps if stamp.audio)
    traits = {
        "modality": ["image+audio+text" if stamp.audio else "image+text" for stamp in stamps],
        "language": [stamp.language for stamp in stamps],
    }
    return summarize(arguments, dict(traits), durations_s, written)


def _members(stamps: list[Stamp], start: int) -> Iterator[dict[str, str | bytes]]:
    for number, stamp in enumerate(stamps, start):
        members: dict[str, str | bytes] = {"__key__": f"stamp{number:06d}", "txt": stamp.caption}
        members["png"] = stamp.image.read_bytes()
        if stamp.audio:
            members["ogg"] = stamp.audio.read_bytes()
        yield members


def _run(*command: str, cwd: Path) -> None:
    name, remedy = command[0], "use Debian or Ubuntu with a network, after `apt-get update`, or leave out --stamps"
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ConfigError("program", name, f"must be installed to fetch {PACKAGE}", remedy) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        rule = f"must succeed, it ended with status {done.returncode}: {lines[-1]}"
        raise ConfigError("command", " ".join(command), rule, remedy)
