"""A cursor is a place in certain shards: a run that is resumed over others is refused, not continued elsewhere."""

import os
import shutil
from pathlib import Path

import pytest

from tests.support.daemons import make_run, serving
from tests.support.trainers import Trainer

RAN_S = 120.0


@pytest.mark.slow
def test_a_shard_that_a_pattern_finds_only_on_resuming_is_refused(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path, samples=24, shards=2)
    first = sorted((tmp_path / "data").glob("*.tar"))[0]
    run = tmp_path / "run"
    with serving(config):
        Trainer(config, run, "--set=train.steps=2").finish()
        os.utime(first)
    with serving(config):
        Trainer(config, run, "--set=train.steps=3", "--resume").finish()
    shutil.copy(first, first.with_name("zz.tar"))
    with serving(config):
        refused = Trainer(config, run, "--set=train.steps=4", "--resume")
        assert refused.process.wait(RAN_S) != 0
        assert "serves other shards (content " in refused.log, refused.log
        assert "Traceback (most recent call last)" not in refused.log.partition("serves other shards")[0]
    assert len(refused.steps()) == 3
