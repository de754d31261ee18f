"""The tars every loader reads: crops of real photographs as JPEG of two common sizes, with a caption each.

They are cut from the demo's photographs, half 640x480 and half 1024x768, quality 88.
"""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

from PIL import Image

from deploy.demo import pictures
from deploy.demo.shards import write_shard
from tests.bench.loader.work import Sample

SHARDS, QUALITY = 8, 88
SIZES = ((640, 480), (1024, 768))
PATTERN = "bench-*.tar"


def build(folder: Path, samples: int) -> list[Path]:
    """Tars of `samples` samples in all under `folder`; what is there already stays."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"bench-{shard:03d}.tar" for shard in range(SHARDS)]
    rng = Random("bench")
    for shard, path in enumerate(paths):
        members = [member(f"{i:06d}", rng) for i in range(samples * shard // SHARDS, samples * (shard + 1) // SHARDS)]
        if not path.exists():
            write_shard(path, map(encoded, members))
    return paths


def member(key: str, rng: Random) -> tuple[str, pictures.Photo, tuple[int, int], tuple[float, float]]:
    """A sample, planned: key, photograph, size, and where the crop lies."""
    return key, rng.choice(pictures.PHOTOS), SIZES[int(key) % len(SIZES)], (rng.random(), rng.random())


def encoded(planned: tuple[str, pictures.Photo, tuple[int, int], tuple[float, float]]) -> dict[str, str | bytes]:
    """The sample's members: the largest crop of the size's shape but a tenth, at a place of its own."""
    key, source, size, (across, down) = planned
    photo, out = pictures.load(source), io.BytesIO()
    scale = 0.9 * min(photo.width / size[0], photo.height / size[1])
    width, height = size[0] * scale, size[1] * scale
    left, top = across * (photo.width - width), down * (photo.height - height)
    box = (left, top, left + width, top + height)
    photo.convert("RGB").resize(size, Image.Resampling.LANCZOS, box=box).save(out, "JPEG", quality=QUALITY)
    return {"__key__": key, "jpg": out.getvalue(), "txt": source.subject}


def samples(folder: Path) -> Iterator[Sample]:
    """Every sample once, in order."""
    for path in sorted(folder.glob(PATTERN)):
        with tarfile.open(path) as tar:
            found: dict[str, bytes] = {}
            for info in tar:
                found[info.name.rpartition(".")[2]] = tar.extractfile(info).read()  # type: ignore[union-attr]
                if len(found) == 2:
                    yield found["jpg"], found["txt"]
                    found = {}


def describe(folder: Path) -> str:
    """The set in a line."""
    sizes = [len(jpeg) for jpeg, _ in samples(folder)]
    shapes = " and ".join(f"{width}x{height}" for width, height in SIZES)
    return (
        f"{len(sizes)} JPEG photographs, {shapes}, {sum(sizes) / len(sizes) / 1e3:.0f} kB on average, in {SHARDS} tars"
    )
