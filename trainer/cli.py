"""`millstream-trainer`: train, bench, weights, checkpoints. An expected error is one line and an exit code.

Runs alone, under `deepspeed --module trainer` or under `torchrun -m trainer`; the launcher's `--local_rank` is dropped
because the environment says the same.
"""

import os
import re
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shared.config import load
from shared.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LoaderTimeout,
    MillstreamError,
    NumericsError,
    ProtocolError,
    SlotError,
)
from shared.logs import setup_logging

if TYPE_CHECKING:
    from shared.sections import RunConfig
    from trainer.launch import Ranks
    from trainer.models.hf import Part

EXIT_CODES = """Exit codes: 0 done or stopped by a signal after saving, 2 configuration refused, 3 loader or data, 4
checkpoint, 5 anything unexpected, 6 losses or gradients not finite."""

app = typer.Typer(
    help="Trains the image + audio + text model on batches of a loader daemon.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command("train", epilog=EXIT_CODES)
def train_run(
    config: Annotated[Path, typer.Option("--config", "-c", help="The run file, for example deploy/configs/demo.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key: --set train.steps=50. May be repeated.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest complete checkpoint.")] = False,
) -> None:
    """Train. The loader daemon of the same run file must be up, or come up within train.wait_s.

    With mesh.pipe above 1 a table of the stages is shown first: layers, parameters and share of cost. mesh.stages cuts
    by hand ([{layers: encode..decoder.3}, {layers: decoder.4..head}]), mesh.balance=measured by each layer's time.

    Example: deepspeed --num_gpus 2 --module trainer train --config run.yaml --set train.steps=50
    """
    run, ranks = _joined(config, overrides)
    from trainer.lifeline import lifeline
    from trainer.train import train

    with lifeline(ranks, exit_code):
        train(run, ranks, resume)
    ranks.leave()


@app.command("bench", epilog=EXIT_CODES)
def bench_run(
    config: Annotated[Path, typer.Option("--config", "-c", help="The run file to measure.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key: --set train.compile=false. May be repeated.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before the measured ones.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps.")] = 20,
    out: Annotated[Path | None, typer.Option(help="A JSON file to write the numbers to as well.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A folder for one more step's kernel times and trace (rank 0).")
    ] = None,
) -> None:
    """Measure a run file: step time, tokens/s, MFU, peak memory, data wait. Needs its loader daemon; saves nothing.

    MFU = model FLOPs / (seconds x devices x peak): 6 for each weight of a matrix product and real place, 12 x width
    for each pair of places in attention, nothing for padding or recomputation (Chowdhery et al. 2022, appendix B).

    Example: deepspeed --num_gpus 1 --module trainer bench --config run.yaml --steps 50
    """
    run, ranks = _joined(config, overrides)
    from trainer.bench import bench
    from trainer.lifeline import lifeline

    with lifeline(ranks, exit_code):
        bench(run, ranks, warmup, steps, out, profile)
    ranks.leave()


RunFile = Annotated[Path, typer.Option("--config", "-c", help="The run file of the model.")]


@app.command("import-weights", epilog=EXIT_CODES)
def import_run(
    config: RunFile,
    out: Annotated[Path, typer.Option("--out", help="The file to write; name it in train.init_from.")],
    vision: Annotated[Path | None, typer.Option(help="Folder of a CLIP or SigLIP checkpoint.")] = None,
    audio: Annotated[Path | None, typer.Option(help="Folder of a Whisper checkpoint.")] = None,
    decoder: Annotated[Path | None, typer.Option(help="Folder of a Llama, Qwen2 or Mixtral checkpoint.")] = None,
) -> None:
    """Turn transformers checkpoints (config.json and safetensors) into a file that training can start from.

    Example: millstream-trainer import-weights --config run.yaml --vision clip-vit-large --out init.safetensors
    """
    from trainer.weights import import_weights

    given: dict[Part, Path | None] = {"vision": vision, "audio": audio, "decoder": decoder}
    folders = {part: folder for part, folder in given.items() if folder}
    if not folders:
        raise ConfigError("import-weights", "no folder", "has nothing to import", "give --vision, --audio or --decoder")
    names = import_weights(load(config), folders, out)
    Console().print(f"{out}: {len(names)} tensors of {', '.join(folders)}", highlight=False)


@app.command("export", epilog=EXIT_CODES)
def export_run(
    config: RunFile,
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint, for example runs/demo/checkpoints/step-00000100.")],
    out: Annotated[Path, typer.Option(help="Folder to write vision, audio and decoder into.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="The overrides that the run was started with.")
    ] = None,
) -> None:
    """Write a checkpoint's fp32 weights as transformers folders (config.json and safetensors), one a part.

    Any layout's checkpoint will do.

    Example: millstream-trainer export --config run.yaml --checkpoint runs/demo/checkpoints/step-00000100 --out demo-hf
    """
    from trainer.source import read_checkpoint
    from trainer.weights import export_weights

    run = load(config, overrides or ())
    for path in export_weights(run, read_checkpoint(run, checkpoint), out):
        Console().print(str(path), highlight=False)


@app.command("verify-checkpoint", epilog=EXIT_CODES)
def verify_checkpoint(
    folder: Annotated[Path, typer.Argument(help="A checkpoint, for example runs/demo/checkpoints/step-00000100.")],
) -> None:
    """Recompute every hash of a checkpoint, and hold that its pieces make up whole tensors.

    Example: millstream-trainer verify-checkpoint runs/demo/checkpoints/step-00000100
    """
    from trainer.manifest import verify
    from trainer.source import Source

    manifest = verify(folder)
    Source(folder)
    size_bytes = sum(entry.size_bytes for entry in manifest.files.values())
    words = f"{folder.name}: step {manifest.step}, {len(manifest.files)} files, {size_bytes:,} bytes, all as saved"
    Console().print(words, highlight=False)
    Console().print(f"saved with {manifest.layout}; next batch {manifest.cursor}", highlight=False)


def _joined(config: Path, overrides: list[str] | None) -> "tuple[RunConfig, Ranks]":
    """The run file, and this process's place among the others; DeepSpeed may be imported from here on."""
    from trainer.launch import join
    from trainer.launchers import watch_launchers

    setup_logging("trainer")
    watch_launchers()
    run = load(config, overrides or ())
    return run, join(run)


def main() -> None:
    """The console script."""
    try:
        app(args=without_local_rank(sys.argv[1:]))
    except MillstreamError as error:
        rank = f" rank {os.environ['RANK']}" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
        sys.stderr.write(f"millstream-trainer{rank}: {error}\n")
        leave(exit_code(error))
    except Exception:
        traceback.print_exc()
        leave(5)


def without_local_rank(arguments: list[str]) -> list[str]:
    """The arguments without a launcher's --local_rank=N."""
    return [argument for argument in arguments if not re.fullmatch(r"--local[_-]rank=\d+", argument)]


def exit_code(error: MillstreamError) -> int:
    """The process's exit code for an error; see EXIT_CODES."""
    loader = (DataError, LoaderTimeout, ProtocolError, SlotError)
    codes = ((ConfigError, 2), (CheckpointError, 4), (loader, 3), (NumericsError, 6))
    return next((code for kind, code in codes if isinstance(error, kind)), 5)


def leave(code: int) -> None:
    """End now: after an error other ranks may never reach the barrier that an orderly end needs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
