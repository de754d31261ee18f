"""`millstream-trainer bench` measures a run file with a real daemon and leaves nothing; trackers follow a run."""

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.daemons import make_run, serving
from tests.support.trainers import Trainer

pytestmark = pytest.mark.slow


def test_bench_prints_speed_utilisation_memory_and_waits_and_saves_nothing(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path, samples=48, shards=2)
    with serving(config):
        flags = ("--warmup", "1", "--steps", "3", "--set=train.peak_tflops=0.02", f"--profile={tmp_path}/profile")
        run = Trainer(config, tmp_path / "bench", *flags, command="bench").finish()
    rows = dict(re.findall(r"│ (.+?) +│ (.+?) +│", run.log))
    assert float(rows["tokens/s, without padding"].replace(",", "")) > 0
    assert 0 < float(rows["MFU of 0.02 TFLOP/s a device"].rstrip("%")) < 100
    assert {"step time, median and p95", "samples/s", "global batches", "rank 0: peak memory"} <= set(rows)
    assert "aten::mm" in (tmp_path / "profile" / "kernels.txt").read_text()
    assert [path.name for path in run.run_dir.iterdir()] == [run.log_path.name]


def test_a_compiled_run_on_a_tracker_trains_as_an_eager_one_does(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path, samples=48, shards=2)
    steps = "--set=train.steps=3"
    with serving(config):
        tracked = "--set=train.trackers=[tensorboard]"
        compiled = Trainer(config, tmp_path / "compiled", steps, tracked, "--set=train.compile=true").finish()
    with serving(config):
        eager = Trainer(config, tmp_path / "eager", steps).finish()
    for name in ("loss", "grad_norm"):
        ours, theirs = ([x[name] for x in run.steps()] for run in (compiled, eager))
        assert ours == pytest.approx(theirs, rel=1e-5)
    events = EventAccumulator(str(compiled.run_dir / "tensorboard")).Reload()
    assert [e.value for e in events.Scalars("loss")] == pytest.approx([x["loss"] for x in compiled.steps()])
    assert re.search(r"[1-9]\d* blocks compiled", compiled.log) and " 0 blocks compiled" in eager.log
