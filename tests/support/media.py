"""Small real media and shards, made on the spot: JPEG, PNG and WebP by Pillow, wav and flac by soundfile."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

Member = tuple[str, bytes]


def photo(width: int, height: int, seed: int = 0, form: str = "JPEG", orientation: int = 1) -> bytes:
    """A smooth colour picture, `width` x `height` as stored, with an EXIF orientation tag where asked."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 255, (4, 4, 3), dtype=np.uint8))
    picture = small.resize((width, height), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    if orientation != 1:
        exif[0x0112] = orientation
    out = io.BytesIO()
    extra = {"exif": exif} if orientation != 1 else {}
    picture.save(out, form, **({"quality": 90} if form == "JPEG" else {}), **extra)
    return out.getvalue()


def tone(seconds: float, rate_hz: int = 16_000, channels: int = 1, hz: float = 440.0, form: str = "WAV") -> bytes:
    """A sine at half scale."""
    t = np.arange(round(seconds * rate_hz)) / rate_hz
    wave = np.repeat((0.5 * np.sin(2 * np.pi * hz * t))[:, None], channels, axis=1)
    out = io.BytesIO()
    soundfile.write(out, wave, rate_hz, format=form, subtype=None if form in ("OGG", "MP3") else "PCM_16")
    return out.getvalue()


def write_tar(path: Path, members: Iterable[Member]) -> Path:
    """A GNU tar of the members, in order."""
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def sample(key: str, number: int) -> list[Member]:
    """One sample whose modality set, shape and caption follow from `number`: image, audio, both, or text alone."""
    caption = f"sample {number} " + "word " * (number % 5)
    members: list[Member] = []
    sizes = [(128, 128), (144, 108), (108, 144), (192, 108), (108, 192), (200, 100)]
    if number % 4 in (0, 2):
        width, height = sizes[number // 4 % len(sizes)]
        members.append((f"{key}.jpg", photo(width, height, number)))
    if number % 4 in (1, 2):
        members.append((f"{key}.wav", tone(0.5 + number % 3, hz=200 + 10 * (number % 40))))
    return [*members, (f"{key}.txt", caption.encode())]


def write_dataset(folder: Path, samples: int = 96, shards: int = 4) -> list[Path]:
    """`shards` tars of mixed samples named `part-000000.tar` and so on; keys are `k0000`, `k0001`, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    each = -(-samples // shards)
    return [
        write_tar(
            folder / f"part-{s:06d}.tar",
            [m for n in range(s * each, min(samples, (s + 1) * each)) for m in sample(f"k{n:04d}", n)],
        )
        for s in range(shards)
    ]
