"""The main job in tensor parallel: two trainers under `deepspeed` that share every layer, and one daemon."""

import re
import urllib.request
from pathlib import Path

import pytest

from tests.support.daemons import make_run, serving
from tests.support.ports import free_port
from tests.support.trainers import Trainer, global_batches

pytestmark = pytest.mark.slow

STEPS = 4
FLAGS = (f"--set=train.steps={STEPS}",)


def counted(port: int, name: str) -> float:
    """A counter of the daemon, over all its labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        text = page.read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}_total(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def test_two_tensor_ranks_train_as_one_process_on_one_decode(tmp_path: Path) -> None:
    port = free_port()
    config_path, config = make_run(tmp_path, samples=96, shards=4, loader={"metrics_port": port})
    with serving(config_path):
        cut = Trainer(config_path, tmp_path / "cut", *FLAGS, "--set=mesh.tensor=2", world=2).finish()
        filled, sent = counted(port, "loader_batches_filled"), counted(port, "loader_batches_sent")
    taken = STEPS * config.data.batch.micro_batches
    ahead = 2 * config.loader.slots_per_stream  # lying in slots, or copied out of them past the last step
    assert taken <= filled <= taken + ahead < 2 * taken
    assert sent >= 2 * taken
    with serving(config_path):
        alone = Trainer(config_path, tmp_path / "alone", *FLAGS).finish()
    for name in ("loss", "grad_norm"):
        ours, theirs = ([x[name] for x in trainer.steps()] for trainer in (cut, alone))
        assert len(ours) == STEPS and ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert global_batches(cut.run_dir) == global_batches(alone.run_dir)
