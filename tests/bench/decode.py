"""Processor time of one JPEG on the CPU, whole and reduced, beside Pillow: `python -m tests.bench.decode OUT.md`.

All three give the same region at 336 x 336; differences are mean absolute grey levels to Pillow's full decode and
bicubic resize. Processor time, not wall time, so a busy machine does not change the order.
"""

import datetime
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from PIL import Image, ImageOps
from skimage import data

from dataloader_svc import decode, headers
from shared.batch import Bucket
from tests.bench.main_job import hardware
from tests.bench.report import table

BUCKET = Bucket(336, 336)
SIZES = ((640, 480), (1024, 768), (2048, 1536))
ROUNDS = 40


def encoded(width: int, height: int, orientation: int) -> bytes:
    """scikit-image's coffee photo at quality 88."""
    exif, out = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.fromarray(data.coffee()).resize((width, height), Image.Resampling.BICUBIC).save(
        out, "JPEG", quality=88, exif=exif
    )
    return out.getvalue()


def by_pillow(blob: bytes) -> Any:
    """Full decode, EXIF, the bucket's region, bicubic."""
    pixels = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(blob)).convert("RGB")))
    top, left, bottom, right = decode.region(pixels.shape[:2], BUCKET)
    region = Image.fromarray(pixels[top:bottom, left:right])
    return np.asarray(region.resize((BUCKET.width, BUCKET.height), Image.Resampling.BICUBIC))


def cpu_ms(work: Callable[[], Any]) -> float:
    """Processor milliseconds of one call, all threads, the mean of ROUNDS."""
    work()
    began = time.process_time()
    for _ in range(ROUNDS):
        work()
    return (time.process_time() - began) / ROUNDS * 1e3


def row(width: int, height: int, orientation: int) -> dict[str, str]:
    """One picture by all three paths."""
    blob = encoded(width, height, orientation)
    facts = headers.image_facts(blob)
    paths: dict[str, Callable[[], Any]] = {
        "Pillow": lambda: by_pillow(blob),
        "full": lambda: decode.decode_one(blob, facts, BUCKET),
        "reduced": lambda: decode.decode_smaller(blob, facts, BUCKET),
    }
    reference = by_pillow(blob).astype(int)
    found = {"picture": f"{width}x{height}, EXIF {orientation}"}
    found |= {f"{name}, ms": f"{cpu_ms(work):.2f}" for name, work in paths.items()}
    differences = {name: np.abs(paths[name]().astype(int) - reference).mean() for name in ("full", "reduced")}
    return found | {f"{name}, difference": f"{value:.2f}" for name, value in differences.items()}


def main(out: Annotated[Path, typer.Argument(help="Markdown file to write")]) -> None:
    """Measure and write a dated table."""
    rows = [row(width, height, orientation) for width, height in SIZES for orientation in (1, 6)]
    today = datetime.datetime.now(datetime.UTC).date()
    lines = ["# One JPEG to 336x336 on a CPU, processor time", "", f"{today}, {hardware()}"]
    lines += ["`python -m tests.bench.decode OUT.md`", "", *table(rows), ""]
    out.write_text("\n".join(lines))
    typer.echo("\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
