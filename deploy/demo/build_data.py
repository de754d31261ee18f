"""Builds the demo data set: real photographs, synthesised speech and captions in WebDataset shards.

    python -m deploy.demo.build_data OUT_DIR

Nothing is downloaded: the photographs come with scikit-image and scikit-learn, the speech from espeak-ng. Equal
arguments give byte-identical shards. OUT_DIR then holds `demo-000000.tar` and so on, `tokenizer.json`, `SUMMARY.json`.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deploy.demo import captions, pictures, speech, stamps, tokenizer
from deploy.demo.shards import Shard, write_shard, write_text
from deploy.demo.summary import Summary, find_finished, prepare, save, summarize, to_table
from shared.errors import ConfigError, MillstreamError

RECIPE = 1  # raise it when equal arguments give other bytes than before
MAX_SAMPLES = 1_000_000  # keys have six digits
SHARES = {"image+text": 0.45, "audio+text": 0.30, "image+audio+text": 0.25}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Sample:
    """One sample, planned: everything it will hold follows from this."""

    key: str
    caption: str
    crop: pictures.Crop | None
    speech: speech.Speech | None

    @property
    def modality(self) -> str:
        return ("image+" if self.crop else "") + ("audio+" if self.speech else "") + "text"


def build(
    out_dir: Path, samples: int = 640, shards: int = 8, seed: int = 0, progress: bool = True, force: bool = False
) -> Summary:
    """Build the set under `out_dir`, or return at once where it is there already."""
    arguments = _check(samples=samples, shards=shards, seed=seed)
    console = Console(quiet=not progress)
    finished = find_finished(out_dir / "SUMMARY.json", arguments, force)
    if finished and (out_dir / "tokenizer.json").is_file():
        console.print(f"{out_dir} already holds this set of {samples} samples; pass --force to build it again")
        return finished
    console.print(f"building {samples} samples in {shards} shards under {out_dir} (seed {seed})")
    start_s = time.monotonic()
    summary = _build(out_dir, arguments, console)
    console.print(f"built {summary.bytes / 1e6:.1f} MB in {time.monotonic() - start_s:.1f} s")
    return summary


def plan(samples: int, shards: int, seed: int) -> list[list[Sample]]:
    """All samples, shard by shard; every shard mixes the modalities in their shares."""
    rng = Random(f"order {seed}")
    crops, deliveries = pictures.plan_crops(Random(f"crops {seed}")), speech.plan_deliveries(Random(f"speech {seed}"))
    sentences, modalities = Random(f"sentences {seed}"), list(_spread(samples))
    planned = []
    for shard in range(shards):
        start, stop = samples * shard // shards, samples * (shard + 1) // shards
        mixed = rng.sample(modalities[start:stop], stop - start)
        keyed = enumerate(mixed, start)
        planned.append([_plan_sample(f"{i:06d}", modality, crops, deliveries, sentences) for i, modality in keyed])
    return planned


def _plan_sample(
    key: str,
    modality: str,
    crops: Iterator[pictures.Crop],
    deliveries: Iterator[speech.Delivery],
    sentences: Random,
) -> Sample:
    crop = next(crops) if "image" in modality else None
    caption = pictures.describe(crop) if crop else captions.sentence(sentences)
    spoken = speech.Speech(caption, next(deliveries)) if "audio" in modality else None
    return Sample(key, caption, crop, spoken)


def _spread(samples: int) -> Iterator[str]:
    """Modalities in their shares, spread so evenly that any stretch of a few holds them all."""
    due = dict.fromkeys(SHARES, 0.0)
    for _ in range(samples):
        due = {modality: due[modality] + share for modality, share in SHARES.items()}
        modality = max(due, key=due.__getitem__)
        due[modality] -= 1
        yield modality


def _check(samples: int, shards: int, seed: int) -> dict[str, int]:
    if shards < 1:
        raise ConfigError("shards", shards, "must be at least 1", "give --shards 8")
    if not shards <= samples <= MAX_SAMPLES:
        rule = f"must lie between the number of shards, {shards}, and {MAX_SAMPLES}"
        raise ConfigError("samples", samples, rule, "give another --samples or --shards")
    return {"samples": samples, "shards": shards, "seed": seed, "recipe": RECIPE}


def _build(out_dir: Path, arguments: dict[str, int], console: Console) -> Summary:
    planned = plan(arguments["samples"], arguments["shards"], arguments["seed"])
    names = [f"demo-{index:06d}.tar" for index in range(len(planned))]
    prepare(out_dir / "SUMMARY.json", "demo-??????.tar", keep=names)
    with _progress_bar(console) as bar:
        task = bar.add_task("building", total=arguments["samples"])
        paths = [out_dir / name for name in names]
        shards, durations_s = _write_shards(paths, planned, advance=lambda: bar.advance(task))
    samples = [sample for shard in planned for sample in shard]
    trained = tokenizer.train(sample.caption for sample in samples)
    write_text(out_dir / "tokenizer.json", trained.to_str(pretty=True))
    summary = summarize(arguments, _traits(samples), durations_s, shards)
    save(out_dir / "SUMMARY.json", summary)
    return summary


def _write_shards(
    paths: list[Path], planned: list[list[Sample]], advance: Callable[[], None]
) -> tuple[list[Shard], list[float]]:
    """Write all shards, one thread each; most of the work (codecs, synthesis) runs without the interpreter lock."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(_write, path, samples, advance) for path, samples in zip(paths, planned, strict=True)]
        try:
            results = [job.result() for job in jobs]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [shard for shard, _ in results], [duration_s for _, duration_s in results]


def _write(path: Path, samples: list[Sample], advance: Callable[[], None]) -> tuple[Shard, float]:
    recordings = list(speech.record([sample.speech for sample in samples if sample.speech]))
    shard = write_shard(path, _members(samples, iter(recordings), advance))
    return shard, sum(recording.duration_s for recording in recordings)


def _members(
    samples: Iterable[Sample], recordings: Iterator[speech.Recording], advance: Callable[[], None]
) -> Iterator[dict[str, str | bytes]]:
    for sample in samples:
        members: dict[str, str | bytes] = {"__key__": sample.key, "txt": sample.caption}
        if sample.crop:
            members[sample.crop.extension] = pictures.encode(sample.crop)
        if sample.speech:
            recording = next(recordings)
            members[recording.extension] = recording.data
        yield members
        advance()


def _traits(samples: list[Sample]) -> dict[str, Iterable[str]]:
    crops = [sample.crop for sample in samples if sample.crop]
    encodings = [sample.speech.delivery.encoding for sample in samples if sample.speech]
    return {
        "modality": (sample.modality for sample in samples),
        "aspect": (crop.aspect.name for crop in crops),
        "image file": (crop.extension for crop in crops),
        "EXIF orientation": (str(crop.orientation) for crop in crops),
        "audio file": (f"{e.extension} {e.rate_hz} Hz {e.channels} ch" for e in encodings),
    }


def _progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=console.quiet or not console.is_terminal)


@app.command()
def main(
    out_dir: Annotated[Path, typer.Argument(help="Directory for the shards; made if missing.", show_default=False)],
    samples: Annotated[int, typer.Option(help="Samples in the whole set.")] = 640,
    shards: Annotated[int, typer.Option(help="Tar files to spread them over; use at least one per loader rank.")] = 8,
    seed: Annotated[int, typer.Option(help="Another seed gives other crops, sentences and voices.")] = 0,
    with_stamps: Annotated[
        bool, typer.Option("--stamps", help="Also build stamps-*.tar: 850 drawings and recorded speech, by apt-get.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Build again, replacing the set that is there.")] = False,
) -> None:
    """Build a small real data set of images, speech and captions, to try Millstream on.

    A sample is KEY.txt with a picture (KEY.jpg, png or webp), speech (KEY.wav or flac) or both.

    Of all samples 45 % are image+text, 30 % audio+text and 25 % image+audio+text, mixed in every shard.

    OUT_DIR also gets tokenizer.json (byte-level BPE, vocabulary 1024) and SUMMARY.json.

    Equal arguments give byte-identical shards, and a second call returns at once.

    First steps: python -m deploy.demo.build_data demo-data

    A quick one: python -m deploy.demo.build_data demo-data --samples 64
    """
    console = Console()
    try:
        console.print(to_table(build(out_dir, samples, shards, seed, force=force), "demo set"))
        if with_stamps:
            console.print(to_table(stamps.build(out_dir, shards, seed, force=force), "stamps set"))
    except (MillstreamError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    app()
