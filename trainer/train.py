"""A training run, from joined ranks to the last checkpoint. Start reading at `train`.

A step is one global batch: every reader pulls its micro-batches of it, the engine takes one optimizer step, and all
ranks agree on what was consumed, on whether the step was skipped (see `nonfinite`) and on whether to stop. Logs are
written before a checkpoint commits the cursor.
"""

import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import NamedTuple

import msgspec
import torch

from shared.batch import Cursor
from shared.config import endpoints, run_dir
from shared.logs import logger
from shared.sections import RunConfig
from shared.skips import is_skipped
from shared.telemetry import MetricsPage
from trainer import metrics
from trainer.beside import readers_beside
from trainer.checkpoint import Checkpoints
from trainer.client import LoaderClient
from trainer.display import Display, show_summary
from trainer.engine import Engine, build_engine
from trainer.expert_stats import ExpertStats
from trainer.feed import Feed, Taken, check_same
from trainer.flops import FlopCounter, mfu, peak_tflops
from trainer.launch import Ranks
from trainer.log import Lines, StepLine, consumed_lines, cut_unopened, step_lines
from trainer.manifest import layout_of, signature_of
from trainer.nonfinite import Skips, StepResult
from trainer.optim import lr_at
from trainer.preprocess import Preprocessor
from trainer.run_folder import run_folder
from trainer.trackers import Tracker, open_tracker
from trainer.waits import Waits

_log = logger("train")


class Start(msgspec.Struct, frozen=True):
    """Where a run begins: steps already done, the first batch to read, and the shards that it is a place in."""

    step: int = 0
    cursor: Cursor = Cursor()
    content: str = ""


class Parts(msgspec.Struct):
    """What the loop works with. Only some ranks have a client, logs and a display."""

    engine: Engine
    checkpoints: Checkpoints
    client: LoaderClient | None
    feed: Feed | None
    steps: Lines | None
    consumed: Lines | None
    display: Display | None
    trackers: tuple[Tracker, ...] = ()


class Totals(msgspec.Struct, frozen=True):
    """Of one step, over all ranks: real tokens, samples, model FLOPs, ranks that skipped it, ranks told to stop."""

    tokens: int
    samples: int
    flops: int
    skipped: int
    stopping: int


class Step(NamedTuple):
    """One step that was taken, as this rank saw it; `taken` is what its reader consumed, if it has one."""

    line: StepLine
    taken: Taken | None
    result: StepResult
    totals: Totals


class Stop:
    """Set by the first SIGTERM or SIGINT, acted on at the next step's end; a second signal ends the process."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.asked = True
        signal.signal(number, signal.SIG_DFL)


def train(config: RunConfig, ranks: Ranks, resume: bool) -> None:
    """Train to `train.steps`, or until told to stop; either way the last state is saved. A complete run says so.

    Raises:
        MillstreamError: something expected went wrong; its kind and text say what.
    """
    port = config.train.metrics_port and config.train.metrics_port + ranks.rank
    stop = Stop()
    page = MetricsPage(port, lambda: True, config.train.metrics_host, "train.metrics_port")
    with stop_on_signals(stop), page, run_folder(config, ranks, resume), ExitStack() as stack:
        engine = build_engine(config, ranks)
        checkpoints = build_checkpoints(config, ranks)
        start = load_start(checkpoints, engine, ranks, resume)
        steps = steps_left(config, ranks, start)
        if steps:
            parts = build_parts(config, ranks, engine, checkpoints, start, stack)
            lines = run_steps(config, ranks, parts, steps, start.cursor, stop)
    if steps and ranks.is_main:
        show_summary(lines, ranks.device)


def build_checkpoints(config: RunConfig, ranks: Ranks) -> Checkpoints:
    """The run's checkpoints."""
    folder, train = run_dir(config) / "checkpoints", config.train
    return Checkpoints(folder, ranks, layout_of(config), signature_of(config), train.keep, train.checkpoint)


def load_start(checkpoints: Checkpoints, engine: Engine, ranks: Ranks, resume: bool) -> Start:
    """Load the newest complete checkpoint when resuming; begin anew where there is none."""
    manifest = checkpoints.load_newest(engine) if resume else None
    if resume and ranks.is_main:
        found = f"step {manifest.step}, {manifest.cursor}" if manifest else "no complete checkpoint: starting anew"
        _log.info("resume from %s: %s", checkpoints.folder, found)
    return Start(manifest.step, manifest.cursor, manifest.content) if manifest else Start()


def steps_left(config: RunConfig, ranks: Ranks, start: Start) -> list[int]:
    """The steps that remain, without those that `data.skip_steps` leaves out; rank 0 says where that is not all.

    Step n trains on global batch n, whatever is left out: the daemon passes over the same batches.
    """
    first, end = start.step, config.train.steps
    steps = [step for step in range(first, end) if not is_skipped(config.data.skip_steps, step)]
    left_out = max(0, end - first) - len(steps)
    if ranks.is_main and left_out:
        _log.info("passing over %d of the steps from %d on, as data.skip_steps asks", left_out, first)
    if ranks.is_main and not steps:
        _log.info("the run is complete: %d steps are done, train.steps is %d; raise it to train on", first, end)
    return steps


def build_parts(
    config: RunConfig, ranks: Ranks, engine: Engine, checkpoints: Checkpoints, start: Start, stack: ExitStack
) -> Parts:
    """Client, feed, logs and display of this rank; the stack closes them."""
    client, feed = None, None
    if ranks.is_reader:
        client = stack.enter_context(connect(config, ranks, start))
        feed = build_feed(config, ranks, client)
    folder, main = run_dir(config), ranks.is_main
    if main:
        cut_unopened(folder, ranks.mesh.data, start.cursor)
    first = ranks.is_reader and ranks.reader == 0
    consumed = stack.enter_context(consumed_lines(folder, ranks.coords.data, start.cursor)) if first else None
    steps = stack.enter_context(step_lines(folder, start.step)) if main else None
    display = Display(start.step, config.train.steps, config.train.log_every) if main else None
    shown = display and stack.enter_context(display)
    trackers = tuple(open_tracker(name, folder, start.step) for name in config.train.trackers) if main else ()
    for tracker in trackers:
        stack.callback(tracker.close)
    return Parts(engine, checkpoints, client, feed, steps, consumed, shown, trackers)


def connect(config: RunConfig, ranks: Ranks, start: Start) -> LoaderClient:
    """This reader's client, from the start's cursor on. A collective of the stream's readers."""
    here, lane = readers_beside(config, ranks), config.loader.lane
    if lane == "cuda" and len(ranks.readers) > 1:  # their batches must be told alike, wherever each one reads
        _log.warning("pixels come through slots, not the cuda lane: %d ranks read each stream", len(ranks.readers))
        lane = "slots"
    return LoaderClient(
        endpoints(config),
        job=config.job,
        data=config.data,
        data_rank=ranks.coords.data,
        data_ranks=ranks.mesh.data,
        reader=here.index(ranks.rank),
        readers=len(here),
        cursor=start.cursor,
        content=start.content,
        wait_s=config.train.wait_s,
        lane=lane,
        device=ranks.device,
        keys_dir=config.loader.keys_dir,
    )


def build_feed(config: RunConfig, ranks: Ranks, client: LoaderClient) -> Feed:
    """Batches of the client as the engine pulls them."""
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    preprocess = Preprocessor(config.data, config.model, ranks.device, dtype)
    preprocess.warm_up()
    counter = FlopCounter(config.data, config.model)
    return Feed(
        preprocess.prefetch(client), config.data.batch.micro_batches, ranks.coords.data, ranks.mesh.data, counter
    )


def run_steps(
    config: RunConfig, ranks: Ranks, parts: Parts, steps: Sequence[int], cursor: Cursor, stop: Stop
) -> list[StepLine]:
    """The loop over `steps` (one at least) from `cursor` on. Returns the lines of those that it ran (on rank 0)."""
    lines: list[StepLine] = []
    skips = Skips(ranks, config.train.skip_limit)
    for step in steps:
        line, taken, result, totals = one_step(config, ranks, parts, step, stop)
        cursor = taken.after if taken else cursor
        record(parts, line, taken)
        skips.note(step, result, [x.batch_id for x in taken.lines] if taken else [], totals.skipped)
        if ranks.is_main:
            lines.append(line)
        parts.checkpoints.poll()
        if totals.stopping or step == steps[-1] or saves_at(step + 1, config.train.save_every):
            save(parts, step + 1, cursor)
        if totals.stopping:
            break
    parts.checkpoints.finish()
    if ranks.is_main:
        done = step + 1
        _log.info("stopped after step %d of %d; checkpoint %d holds it", done, config.train.steps, done)
    return lines


def one_step(config: RunConfig, ranks: Ranks, parts: Parts, step: int, stop: Stop) -> Step:
    """Train on one global batch."""
    began = time.perf_counter()
    lr = lr_at(step, config.train.steps, config.train.optim)
    result = parts.engine.train_batch(parts.feed or iter(()), lr)
    taken = take(parts, ranks)
    totals = Totals(*ranks.sum(share_of(ranks, taken, result, stop)))
    step_s = time.perf_counter() - began
    share = mfu(totals.flops, step_s, ranks.mesh.world, peak_tflops(ranks.device, config.train.peak_tflops))
    return Step(step_line(step, result, lr, totals, step_s, share, parts.client), taken, result, totals)


def take(parts: Parts, ranks: Ranks) -> Taken | None:
    """What this reader consumed in the step, after comparing it with what the other readers of its stream consumed."""
    if parts.feed is None:
        return None
    taken = parts.feed.take()
    if len(ranks.readers) > 1:
        fingerprints = ranks.among_readers([line.fingerprint for line in taken.lines])
        check_same(taken.lines, fingerprints, ranks.readers)
    return taken


def share_of(ranks: Ranks, taken: Taken | None, result: StepResult, stop: Stop) -> tuple[int, ...]:
    """This rank's share of the `Totals`."""
    flags = int(result.skipped), int(stop.asked)
    if not (taken and ranks.reader == 0):
        return 0, 0, 0, *flags
    return taken.tokens, taken.samples, int(taken.flops), *flags


def step_line(
    step: int,
    result: StepResult,
    lr: float,
    totals: Totals,
    step_s: float,
    share: float | None,
    client: LoaderClient | None,
) -> StepLine:
    """The step's numbers; `share` is its MFU."""
    waits = client.wait_stats().run if client else Waits()
    speed = totals.tokens / step_s
    loss, norm = (x if math.isfinite(x) else None for x in (result.loss, result.grad_norm))
    numbers = (lr, totals.tokens, totals.samples, step_s, speed)
    times = waits.p50_s * 1e3, waits.p99_s * 1e3
    return StepLine(step, loss, norm, *numbers, *times, share, result.skipped, result.experts)


def record(parts: Parts, line: StepLine, taken: Taken | None) -> None:
    """Write, show and count the step wherever this rank does so."""
    if parts.steps and parts.display:
        parts.steps.write([line])
        parts.display.step(line)
    for tracker in parts.trackers:
        tracker.step(line)
    if parts.consumed and taken:
        parts.consumed.write(taken.lines)
    observe(line, taken, parts.client)


def observe(line: StepLine, taken: Taken | None, client: LoaderClient | None) -> None:
    """Bring this rank's metrics up to date."""
    if client:
        metrics.RECONNECTS.set(client.reconnects)
        metrics.JUNK.set(client.junk)
    metrics.STEP.set(line.step + 1)
    metrics.LOSS.set(math.nan if line.loss is None else line.loss)
    metrics.GRAD_NORM.set(math.nan if line.grad_norm is None else line.grad_norm)
    metrics.STEPS_SKIPPED.inc(line.skipped)
    metrics.STEP_SECONDS.observe(line.step_s)
    if line.experts:
        observe_experts(line.experts)
    if taken:
        metrics.TOKENS.inc(taken.tokens)
        metrics.SAMPLES.inc(taken.samples)
        for wait_s, preprocess_s in zip(taken.waits_s, taken.preprocess_s, strict=True):
            metrics.DATA_WAIT_SECONDS.observe(wait_s)
            metrics.PREPROCESS_SECONDS.observe(preprocess_s)


def observe_experts(stats: ExpertStats) -> None:
    """Bring the experts' metrics up to date."""
    metrics.EXPERT_BALANCE_LOSS.set(stats.balance_loss)
    metrics.ROUTER_Z_LOSS.set(stats.router_z_loss)
    metrics.EXPERT_DROPPED_SHARE.set(stats.dropped_share)
    for place, shares in enumerate(stats.load):
        for expert, share in enumerate(shares):
            metrics.EXPERT_LOAD.labels(place, expert).set(share)


def saves_at(step: int, every: int) -> bool:
    """Whether a checkpoint is due after `step` steps."""
    return bool(every) and step % every == 0


def save(parts: Parts, step: int, cursor: Cursor) -> None:
    """Logs first, then the checkpoint whose cursor they lead up to."""
    with metrics.CHECKPOINT_SECONDS.time():
        for lines in (parts.steps, parts.consumed):
            if lines:
                lines.sync()
        parts.checkpoints.save(parts.engine, step, cursor, parts.client.content if parts.client else "")


@contextmanager
def stop_on_signals(stop: Stop) -> Iterator[None]:
    """SIGTERM and SIGINT set the flag while this is open."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
