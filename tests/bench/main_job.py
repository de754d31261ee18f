"""The main job in numbers, on whatever machine this is: `python -m tests.bench.main_job OUT.md`.

One run on one machine over the same tars: the trainer's wait for data inside the real training loop, and images/s
that reach the training device, each with CPU and (where there is one) GPU decode; beside them torch's DataLoader
reading the same tars through webdataset and Pillow in worker processes, as people do it today.
"""

import datetime
import io
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import soundfile
import torch
import typer
from PIL import Image, ImageOps
from scipy.signal import resample_poly

from deploy.demo.run import CONFIG, ROOT, RUN, daemon
from shared.config import endpoint, load
from shared.sections import RunConfig
from tests.bench.report import machine, table
from trainer.batches import Batch
from trainer.client import LoaderClient
from trainer.preprocess import DeviceBatch, Preprocessor

SIDE, RATE_HZ = 128, 16_000
WARM_BATCHES = 32


def overrides(data: Path, device: str, workers: int) -> list[str]:
    """Run-file overrides of one measurement."""
    pairs = {
        "data.datasets": f'[{{name: demo, shards: ["{data}/demo-*.tar"]}}]',
        "data.text.tokenizer": f"{data}/tokenizer.json",
        "loader.device": device,
        "loader.workers": str(workers),
        "loader.slots_per_stream": "8",
        "mesh.data": "1",
    }
    return [f"--set={key}={value}" for key, value in pairs.items()]


def loop(data: Path, device: str, workers: int, steps: int) -> dict[str, str]:
    """The demo's training loop with `loader.device` = device."""
    command = [sys.executable, "-m", "deploy.demo.run", "--data", str(data), "--steps", str(steps)]
    chosen = [o for o in overrides(data, device, workers) if "loader" in o]
    subprocess.run([*command, *chosen, "--set=train.precision=bf16"], cwd=ROOT, check=True)
    lines = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    first, last = (statistics.mean(x["loss"] for x in part) for part in (lines[:5], lines[-5:]))
    return {
        "decode": device,
        "steps": str(len(lines)),
        "loss first / last 5": f"{first:.3f} / {last:.3f}",
        "step ms, median": f"{1e3 * statistics.median(x['step_s'] for x in lines):.1f}",
        "wait p50 ms": f"{lines[-1]['wait_p50_ms']:.3f}",
        "wait p99 ms": f"{lines[-1]['wait_p99_ms']:.3f}",
    }


def drain(data: Path, device: str, workers: int, seconds: float) -> dict[str, str]:
    """As many batches as the daemon can deliver: on a GPU preprocessed there, on a CPU as they are handed over."""
    options = overrides(data, device, workers)
    config = load(CONFIG, [o.removeprefix("--set=") for o in options])
    counts = []
    with daemon(options), LoaderClient(endpoint(config), job=config.job, data=config.data) as client:
        batches = arriving(config, client)
        for _ in range(WARM_BATCHES):
            next(batches)
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            counts.append(next(batches).counts)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - began
    return rates(f"millstream, {device} decode, {workers} workers", counts, elapsed)


def arriving(config: RunConfig, client: LoaderClient) -> Iterator[Batch | DeviceBatch]:
    """Batches where the trainer wants them."""
    if not torch.cuda.is_available():
        return iter(client)
    return Preprocessor(config.data, config.model, torch.device("cuda"), torch.bfloat16).prefetch(client)


def rates(name: str, counts: list[Any], elapsed: float) -> dict[str, str]:
    """Samples, images and clips per second."""
    sums = {field: sum(getattr(c, field) for c in counts) / elapsed for field in ("samples", "images", "clips")}
    return {"loader": name, **{f"{field}/s": f"{value:.0f}" for field, value in sums.items()}}


def baseline(data: Path, workers: int, seconds: float) -> dict[str, str]:
    """torch DataLoader + webdataset + Pillow + soundfile: same sizes and rate, padded batches of 8, copied to the
    training device.
    """
    import webdataset

    shards = sorted(map(str, data.glob("demo-*.tar")))
    dataset = webdataset.WebDataset(shards, shardshuffle=False, resampled=True).map(decoded)
    loader = torch.utils.data.DataLoader(dataset.batched(8, collation_fn=collate), batch_size=None, num_workers=workers)
    target = "cuda" if torch.cuda.is_available() else "cpu"
    counts, batches = [0, 0, 0], iter(loader)
    for _ in range(WARM_BATCHES):
        next(batches)
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        samples, images, clips = next(batches)
        images.to(target), clips.to(target)
        counts = [a + b for a, b in zip(counts, (samples, len(images), len(clips)), strict=True)]
    elapsed = time.perf_counter() - began
    names = ("samples/s", "images/s", "clips/s")
    shown = {name: f"{count / elapsed:.0f}" for name, count in zip(names, counts, strict=True)}
    return {"loader": f"DataLoader + webdataset + Pillow, {workers} workers", **shown}


def decoded(sample: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A sample's picture [3, 128, 128] and clip [S], whichever it has."""
    found: dict[str, torch.Tensor] = {}
    for name, value in sample.items():
        if name in ("jpg", "png", "webp"):
            picture = ImageOps.exif_transpose(Image.open(io.BytesIO(value))).convert("RGB")
            pixels = np.asarray(ImageOps.fit(picture, (SIDE, SIDE), Image.Resampling.BICUBIC))
            found["image"] = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
        elif name in ("wav", "flac"):
            wave, rate_hz = soundfile.read(io.BytesIO(value), dtype="float32", always_2d=True)
            common = math.gcd(rate_hz, RATE_HZ)
            clip = resample_poly(wave.mean(1), RATE_HZ // common, rate_hz // common)
            found["clip"] = torch.from_numpy((clip * 32767).astype("int16"))
    return found


def collate(samples: list[dict[str, torch.Tensor]]) -> tuple[int, torch.Tensor, torch.Tensor]:
    """(samples, images [N, 3, 128, 128], clips [M, longest])."""
    images = [s["image"] for s in samples if "image" in s]
    clips = [s["clip"] for s in samples if "clip" in s]
    padded = torch.nn.utils.rnn.pad_sequence(clips, batch_first=True) if clips else torch.empty(0, 0)
    return len(samples), torch.stack(images) if images else torch.empty(0, 3, SIDE, SIDE), padded


def hardware() -> str:
    """The machine in a line."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{machine()}{gpu}; torch {torch.__version__}"


def main(
    out: Annotated[Path, typer.Argument(help="Markdown file to write")],
    data: Annotated[Path, typer.Option(help="the demo data")] = ROOT / "demo-data",
    steps: Annotated[int, typer.Option(help="training steps of each loop")] = 100,
    seconds: Annotated[float, typer.Option(help="how long each loader is drained")] = 15.0,
    workers: Annotated[int, typer.Option(help="decode worker processes, for every loader")] = 1,
) -> None:
    """Measure the main job and write a dated table."""
    devices = ["cpu", "gpu"] if torch.cuda.is_available() else ["cpu"]
    loops = [loop(data, device, workers, steps) for device in devices]
    drains = [drain(data, device, workers, seconds) for device in devices] + [baseline(data, workers, seconds)]
    today = datetime.datetime.now(datetime.UTC).date()
    command = f"python -m tests.bench.main_job --steps {steps} --seconds {seconds:g} --workers {workers}"
    lines = ["# The main job on the demo data", "", f"{today}, {hardware()}", f"`{command}`", ""]
    lines += ["## Inside the training loop (deepspeed, one process, bf16)", "", *table(loops), ""]
    lines += ["## As many batches as can be had, where the trainer wants them", "", *table(drains), ""]
    out.write_text("\n".join(lines))
    typer.echo("\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
