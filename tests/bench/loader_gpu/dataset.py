"""Tars of JPEG pictures as heavy as photographs, made on the spot in seconds: noise whose spectrum falls as theirs.

Amplitudes fall as frequency^-SLOPE (photographs: about -1.2, Burton and Moorhead 1987, and steeper with a camera's
blur). At quality 88 that makes 80 kB of 640x480 and 150 kB of 1024x768. Some hundred are distinct; they come again
under other keys.
"""

import io
import tarfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

SIZES = {"640x480": (640, 480), "1024x768": (1024, 768)}
SHARDS, SLOPE, CONTRAST, QUALITY = 8, 1.5, 48.0, 88


def build(folder: Path, size: str, distinct: int, samples: int, processes: int) -> Path:
    """`samples` pictures of `size` with captions, in tars under `folder`/`size`, unless they are there; that folder."""
    place = folder / size
    if len(list(place.glob("*.tar"))) == SHARDS:
        return place
    place.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(processes) as pool:
        jpegs = list(pool.map(partial(picture, *SIZES[size]), range(distinct), chunksize=4))
    for shard in range(SHARDS):
        write(place / f"part-{shard:03d}.tar", jpegs, range(shard * samples // SHARDS, (shard + 1) * samples // SHARDS))
    return place


def picture(width: int, height: int, seed: int) -> bytes:
    """One JPEG: three such fields, the first as brightness, the others as faint colour."""
    rng = np.random.default_rng([width, seed])
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :])
    frequency[0, 0] = 1.0
    fields = []
    for _ in range(3):
        phases = rng.normal(size=frequency.shape) + 1j * rng.normal(size=frequency.shape)
        field = np.fft.irfft2(phases / frequency**SLOPE, (height, width))
        fields.append(field / field.std())
    light, red, blue = fields
    rgb = np.stack([light + 0.25 * red, light - 0.1 * red - 0.1 * blue, light + 0.25 * blue], -1)
    out = io.BytesIO()
    Image.fromarray(np.clip(128 + CONTRAST * rgb, 0, 255).astype(np.uint8)).save(out, "JPEG", quality=QUALITY)
    return out.getvalue()


def write(path: Path, jpegs: list[bytes], numbers: range) -> None:
    """A tar of the samples `numbers`, which appears when it is whole."""
    scratch = path.with_suffix(".tmp")
    with tarfile.open(scratch, "w", format=tarfile.GNU_FORMAT) as tar:
        for number in numbers:
            for ending, data in (("jpg", jpegs[number % len(jpegs)]), ("txt", f"picture {number}".encode())):
                info = tarfile.TarInfo(f"{number:08d}.{ending}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    scratch.rename(path)


def describe(folder: Path) -> str:
    """The set in a line."""
    tars = sorted(folder.glob("*.tar"))
    sizes = []
    for path in tars:
        with tarfile.open(path) as tar:
            sizes += [info.size for info in tar if info.name.endswith("jpg")]
    mean_kb = sum(sizes) / len(sizes) / 1e3
    return f"{folder.name}: {len(sizes)} JPEG pictures, {mean_kb:.0f} kB on average, in {len(tars)} tars"
