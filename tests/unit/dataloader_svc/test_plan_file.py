"""Kept plans: mapped, the same to the last sample, used by nobody but those whose plan it is, and never needed."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dataloader_svc.bucket import Columns
from dataloader_svc.jobs import plan_of
from dataloader_svc.plan import Pack, Planner
from dataloader_svc.plan_file import PlanFiles, key_of
from shared.batch import Cursor
from shared.errors import ShardError
from shared.logs import logger
from shared.sections import BatchSection, DataSection, RunConfig, TextSection
from tests.support.columns import columns
from tests.support.daemons import ROOT, make_run
from tests.support.tars import built, data_section

DATA = data_section(batch=BatchSection(256, 4, 2))
FACTS = columns(2000, bad_share=0.05)


class Forbidden:
    """Facts that nobody may look at."""

    def __getattr__(self, name: str) -> None:
        raise AssertionError(f"looked at {name}")


class FailingOnce:
    """Facts that cannot be read at first, as when storage fails for a moment."""

    failed = False

    @property
    def facts(self) -> Columns:
        if not self.failed:
            self.failed = True
            raise ShardError("for a moment")
        return FACTS


def planner(folder: Path, data: DataSection = DATA, facts: Columns | Forbidden = FACTS, index: str = "i") -> Planner:
    return Planner(data, facts, PlanFiles(folder, "job", key_of(data, index)))


def packs(planner: Planner, epoch: int = 0) -> list[Pack]:
    return [planner.pack(Cursor(epoch, step, m), m % 2, 2) for step in range(planner.steps(epoch)) for m in range(2)]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    log = logger("plan")
    log.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING)
    yield caplog
    log.removeHandler(caplog.handler)


def test_a_kept_plan_gives_the_very_same_packs_and_looks_at_no_facts(tmp_path: Path) -> None:
    made = planner(tmp_path)
    expected, summary = packs(made), made.summary(0)
    again = planner(tmp_path, facts=Forbidden())
    assert packs(again) == expected == packs(Planner(DATA, FACTS))
    assert again.summary(0) == summary == Planner(DATA, FACTS).summary(0)
    assert again.groups() == made.groups() == Planner(DATA, FACTS).groups()
    plan = again._epochs.plan(0)
    assert not any(getattr(plan, name).flags.owndata for name in plan.__struct_fields__)


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"batch": BatchSection(256, 4, 4)}, {"batch": BatchSection(256, 4, 2, "drop")}]
)
def test_another_order_never_takes_a_kept_plan(tmp_path: Path, other: dict[str, object]) -> None:
    planner(tmp_path).summary(0)
    data = msgspec.structs.replace(DATA, **other)
    assert packs(planner(tmp_path, data)) == packs(Planner(data, FACTS))
    assert planner(tmp_path, data).summary(0) == Planner(data, FACTS).summary(0)


def test_another_index_or_version_never_takes_a_kept_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = columns(1500, seed=9)
    packs(planner(tmp_path))
    assert packs(planner(tmp_path, facts=facts, index="j")) == packs(Planner(DATA, facts))
    before = key_of(DATA, "i")
    assert key_of(msgspec.structs.replace(DATA, skip_steps=((3, 5),)), "i") == before
    monkeypatch.setattr("dataloader_svc.plan_file.ORDER", -1)
    assert key_of(DATA, "i") != before


@pytest.mark.parametrize("damage", ["cut", "byte", "junk", "empty", "header"])
def test_a_damaged_plan_is_told_and_made_anew(tmp_path: Path, damage: str, told: pytest.LogCaptureFixture) -> None:
    expected = packs(planner(tmp_path))
    path = tmp_path / "job.0.plan"
    raw = path.read_bytes()
    middle = len(raw) // 2
    flipped = raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :]
    header = raw[:40] + b"?" + raw[41:]
    path.write_bytes({"cut": raw[:-80], "byte": flipped, "junk": b"junk" * 50, "empty": b"", "header": header}[damage])
    assert packs(planner(tmp_path)) == expected
    assert (damage == "header") or "job.0.plan is not used" in told.text
    assert packs(planner(tmp_path, facts=Forbidden())) == expected


def test_a_folder_that_cannot_be_written_is_told_and_done_without(
    tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert packs(planner(tmp_path / "file")) == packs(Planner(DATA, FACTS))
    assert "cannot be kept (File exists)" in told.text


def test_a_plan_that_could_not_be_made_is_tried_again() -> None:
    planner = Planner(DATA, FailingOnce())  # type: ignore[arg-type]
    with pytest.raises(ShardError, match="for a moment"):
        planner.steps(0)
    assert packs(planner) == packs(Planner(DATA, FACTS))


def test_two_plans_of_a_job_are_kept_and_no_other_jobs_are_touched(tmp_path: Path) -> None:
    (tmp_path / "job2.0.plan").write_text("")
    files, plan = PlanFiles(tmp_path, "job", "key"), Planner(DATA, FACTS)._epochs.plan(0)
    for epoch in range(4):
        files.keep_plan(epoch, plan)
        os.utime(tmp_path / f"job.{epoch}.plan", (epoch, epoch))
    assert {path.name for path in tmp_path.iterdir()} == {"job.2.plan", "job.3.plan", "job.rounds", "job2.0.plan"}


def test_no_epoch_is_planned_twice_to_count_steps_over_epochs(tmp_path: Path) -> None:
    data = data_section(batch=BatchSection(256, 1, 1), text=TextSection(max_tokens=48, expected_tokens=12))
    first = planner(tmp_path, data)
    steps = [first.steps(epoch) for epoch in range(6)]
    assert len(set(steps)) > 1
    late = (sum(steps[:5]), sum(steps[:5]) + 1)
    skipping = planner(tmp_path, msgspec.structs.replace(data, skip_steps=(late,)), Forbidden())
    assert skipping.skips.spans() == [(Cursor(5, 0), Cursor(5, 1))]
    assert not skipping._epochs._plans
    with pytest.raises(AssertionError, match="looked at"):
        planner(tmp_path, msgspec.structs.replace(data, seed=1), Forbidden()).steps(0)


def test_a_changed_shard_changes_the_index_digest(tmp_path: Path) -> None:
    _, config = make_run(tmp_path)
    index, _ = built(config.data)
    assert built(config.data)[0].digest == index.digest
    shard = Path(index.shards[0].path)
    os.utime(shard, (1, 1))
    assert built(config.data)[0].digest != index.digest


def test_a_job_with_an_index_folder_keeps_its_plan_there(tmp_path: Path) -> None:
    _, config = make_run(tmp_path, loader={"index_dir": str(tmp_path / "idx")})
    index, _ = built(config.data, tmp_path / "idx")
    plan_of(config, index, config.job, config.data).steps(0)
    assert (tmp_path / "idx" / f"{config.job}.0.plan").exists()
    without: RunConfig = msgspec.structs.replace(config, loader=msgspec.structs.replace(config.loader, index_dir=""))
    assert plan_of(without, index, config.job, config.data)._epochs._files is None


def test_a_kept_plan_costs_no_memory_a_sample(tmp_path: Path) -> None:
    """An epoch of 400,000 samples is made with tens of megabytes, and taken up again with hardly any."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.unit.dataloader_svc.test_plan_file import *\n"
        "def anonymous_kb():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith('RssAnon'))\n"
        "facts = columns(400_000) if sys.argv[2] == 'make' else Forbidden()\n"
        "Planner(DATA, FACTS).steps(0)\n"
        "mine, before = planner(Path(sys.argv[1]), facts=facts), anonymous_kb()\n"
        "pack = mine.pack(Cursor(0, mine.steps(0) // 2), 0, 1)\n"
        "print(anonymous_kb() - before, pack.batch_id)\n"
    )

    def run(how: str) -> tuple[int, str]:
        command = [sys.executable, "-c", program, str(tmp_path), how]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
        grown_kb, batch_id = done.stdout.split()
        return int(grown_kb), batch_id

    made, taken = run("make"), run("take")
    assert made[1] == taken[1]
    assert taken[0] < 4096 < made[0]
