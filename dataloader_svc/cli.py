"""`millstream-loader`: serve, index, top, keys, verify. An expected error is one line on stderr and an exit code."""

import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from dataloader_svc.daemon import serve as serve_run
from dataloader_svc.server import make_keys
from shared import keys as key_files
from shared.config import load
from shared.errors import ConfigError, DataError, MillstreamError, TooManyBadSamples, writing
from shared.logs import setup_logging

EXIT_CODES = """Exit codes: 0 done, 1 verify found lost or repeated samples, 2 configuration refused, 3 data or shards
unusable, 4 too many bad samples, 5 anything unexpected."""

UNEXPECTED = 5
METRICS_URL = "http://127.0.0.1:9100/metrics"

app = typer.Typer(
    help="Serves training batches from WebDataset shards to the trainers of one node.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Config = Annotated[Path, typer.Option("--config", "-c", help="The run file, for example deploy/configs/demo.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override one key: --set loader.workers=4. May be repeated.")
]


@app.command(epilog=EXIT_CODES)
def serve(
    config: Config,
    overrides: Overrides = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Written with the endpoint when readers are welcome, removed at the end.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Run the daemon until SIGTERM or Ctrl-C. Missing indexes are built first.

    Example: millstream-loader serve --config run.yaml --set loader.workers=4
    """
    _log_to_stderr(log_level)
    serve_run(load(config, overrides or ()), ready_file)


@app.command(epilog=EXIT_CODES)
def index(
    config: Config,
    overrides: Overrides = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=0, help="Shards at a time (0: loader.threads).")] = 0,
) -> None:
    """Index the shards, and show what is in them, what is wrong with them, and what the buckets make of them.

    A remote shard is read once, into loader.cache_dir where that is set.

    Example: millstream-loader index --config run.yaml --jobs 8
    """
    _log_to_stderr("WARNING")
    from dataloader_svc import screens

    screens.index_shards(load(config, overrides or ()), jobs)


@app.command("top")
def show_top(
    url: Annotated[str, typer.Option(help="The daemon's metrics page.")] = METRICS_URL,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and leave.")] = False,
    every_s: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between frames.")] = 1.0,
) -> None:
    """Watch a running daemon: stage latencies, slots, readers, rates, buckets and bad samples.

    Example: millstream-loader top --url http://127.0.0.1:9100/metrics
    """
    from dataloader_svc import screens

    screens.watch(url, once, every_s)


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="Made if it is not there; set loader.keys_dir to it.")],
) -> None:
    """Make key pairs for a daemon and its readers, so that they can talk over TCP: encrypted, and nobody else.

    The daemon's host needs daemon.secret and reader.public; each trainer's host daemon.public and reader.secret.

    Example: millstream-loader keys ~/.millstream/keys
    """
    with writing("keys", folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in (key_files.DAEMON, key_files.READER):
        key_files.write_pair(folder, name, *make_keys())
    typer.echo(f"made daemon and reader keys in {folder}; keep the .secret files secret")


@app.command("verify", epilog=EXIT_CODES)
def verify_logs(
    config: Config,
    consumed: Annotated[
        list[Path], typer.Option("--consumed", help="A run's folder, or consumed-*.jsonl of it. Repeatable.")
    ],
    overrides: Overrides = None,
) -> None:
    """Prove from trainers' logs that every planned sample was consumed exactly once. It takes those of all data ranks.

    Example: millstream-loader verify --config run.yaml --consumed runs/demo
    """
    _log_to_stderr("WARNING")
    from dataloader_svc import screens

    if not screens.verify_logs(load(config, overrides or ()), consumed):
        raise typer.Exit(1)


def main() -> None:
    """The console script."""
    try:
        app()
    except MillstreamError as error:
        sys.stderr.write(f"millstream-loader: {error}\n")
        sys.exit(exit_code(error))
    except Exception:
        traceback.print_exc()
        sys.exit(UNEXPECTED)


def exit_code(error: MillstreamError) -> int:
    """The process's exit code for an error; see EXIT_CODES."""
    codes = ((TooManyBadSamples, 4), (ConfigError, 2), (DataError, 3))
    return next((code for kind, code in codes if isinstance(error, kind)), UNEXPECTED)


def _log_to_stderr(level: str) -> None:
    levels = ("DEBUG", "INFO", "WARNING", "ERROR")
    if level.upper() not in levels:
        raise ConfigError("--log-level", level, f"must be one of {', '.join(levels)}", "use INFO")
    setup_logging("loader", level.upper())
