"""The main job, as a user runs it: a daemon, a trainer under `deepspeed`, and everything that may be killed, killed."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemons import Daemon, kill_process, make_run, make_run_file, serving
from tests.support.media import sample, tone, write_tar
from tests.support.trainers import Trainer, consumed, global_batches, verify

pytestmark = pytest.mark.slow

STEPS = 24
SAVE_EVERY = 8
FLAGS = (f"--set=train.steps={STEPS}", f"--set=train.save_every={SAVE_EVERY}")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run file over a small dataset, with a daemon up."""
    folder = tmp_path_factory.mktemp("job")
    config, _ = make_run(folder, samples=96, shards=4)
    with serving(config):
        yield config


@pytest.fixture(scope="module")
def unbroken(site: Path) -> Trainer:
    """One process, nothing in its way."""
    return Trainer(site, site.parent / "unbroken", *FLAGS).finish()


def same_training(a: Trainer, b: Trainer) -> None:
    """Losses and gradient norms to the last digit, batches and samples one by one."""
    numbers = ("step", "loss", "grad_norm", "lr", "tokens", "samples")
    assert [[x[n] for n in numbers] for x in a.steps()] == [[x[n] for n in numbers] for x in b.steps()]
    assert consumed(a.run_dir) == consumed(b.run_dir)


def test_the_loss_falls_and_verify_finds_every_sample_once(site: Path, unbroken: Trainer) -> None:
    losses = [x["loss"] for x in unbroken.steps()]
    assert len(losses) == STEPS and sum(losses[-4:]) < sum(losses[:4])
    proof = verify(site, unbroken.run_dir)
    assert proof.returncode == 0, proof.stdout + proof.stderr


def test_a_killed_trainer_resumes_as_if_nothing_had_been(site: Path, unbroken: Trainer) -> None:
    first = Trainer(site, site.parent / "killed", *FLAGS)
    first.wait_checkpoint(SAVE_EVERY)
    first.wait_step(SAVE_EVERY + 3)
    first.kill()
    second = Trainer(site, first.run_dir, *FLAGS, "--resume").finish()
    assert f"resume from {first.run_dir}" in second.log
    same_training(second, unbroken)


def test_a_killed_trainer_resumes_in_another_layout_with_no_sample_lost_or_repeated(
    site: Path, unbroken: Trainer
) -> None:
    first = Trainer(site, site.parent / "moved", *FLAGS, "--set=mesh.data=2", world=2)
    first.wait_checkpoint(SAVE_EVERY)
    first.wait_step(SAVE_EVERY + 3)
    first.kill()
    second = Trainer(site, first.run_dir, *FLAGS, "--set=mesh.pipe=2", "--resume", world=2).finish()
    assert "was saved with pipe 1, data 2, tensor 1, ZeRO 1, goes on with pipe 2, data 1" in second.log
    for name in ("loss", "grad_norm"):
        ours, alone = ([x[name] for x in t.steps()] for t in (second, unbroken))
        assert ours == pytest.approx(alone, rel=1e-4)
    assert global_batches(second.run_dir) == global_batches(unbroken.run_dir)
    proof = verify(site, second.run_dir)
    assert proof.returncode == 0, proof.stdout + proof.stderr


def test_a_stopped_trainer_saves_and_resumes_as_if_nothing_had_been(site: Path, unbroken: Trainer) -> None:
    first = Trainer(site, site.parent / "stopped", *FLAGS)
    first.wait_step(3)
    first.stop()
    done = len(first.steps())
    assert 3 <= done < STEPS and list((first.run_dir / "checkpoints").glob(f"step-{done:08d}"))
    same_training(Trainer(site, first.run_dir, *FLAGS, "--resume").finish(), unbroken)


@pytest.mark.parametrize("steps", [STEPS, STEPS - 4])
def test_a_run_that_is_complete_says_so_and_changes_nothing(
    site: Path, unbroken: Trainer, tmp_path: Path, steps: int
) -> None:
    shutil.copytree(unbroken.run_dir, tmp_path / "run")
    again = Trainer(site, tmp_path / "run", *FLAGS, f"--set=train.steps={steps}", "--resume").finish()
    assert f"the run is complete: {STEPS} steps are done, train.steps is {steps}; raise it to train on" in again.log
    assert "stopped after" not in again.log and "passing over" not in again.log
    same_training(again, unbroken)
    assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == sorted(
        tmp_path / "run" / "checkpoints" / path.name for path in (unbroken.run_dir / "checkpoints").iterdir()
    )


def test_a_killed_daemon_costs_nothing_and_repeats_nothing(tmp_path: Path, unbroken: Trainer) -> None:
    config, _ = make_run(tmp_path, samples=96, shards=4)
    with serving(config) as daemon:
        trainer = Trainer(config, tmp_path / "run", *FLAGS)
        trainer.wait_step(3)
        daemon.kill()
        with serving(config) as successor:
            same_training(trainer.finish(), unbroken)
            assert successor.terminate() == 0
    assert list((tmp_path / "shm").iterdir()) == []


def test_nobody_notices_a_killed_worker(tmp_path: Path, unbroken: Trainer) -> None:
    config, _ = make_run(tmp_path, samples=96, shards=4)
    with serving(config) as daemon:
        trainer = Trainer(config, tmp_path / "run", *FLAGS)
        trainer.wait_step(2)
        kill_process(daemon.workers()[0])
        same_training(trainer.finish(), unbroken)
        assert daemon.process.poll() is None


@pytest.mark.parametrize(("pipe", "data"), [(1, 2), (2, 1)])
def test_layouts_train_alike_on_the_same_global_batches(site: Path, unbroken: Trainer, pipe: int, data: int) -> None:
    mesh = (f"--set=mesh.pipe={pipe}", f"--set=mesh.data={data}")
    trainer = Trainer(site, site.parent / f"p{pipe}d{data}", *FLAGS, *mesh, world=pipe * data).finish()
    for name in ("loss", "grad_norm"):
        ours, alone = ([x[name] for x in t.steps()] for t in (trainer, unbroken))
        assert ours[:4] == pytest.approx(alone[:4], rel=1e-5, abs=1e-5)
    assert global_batches(trainer.run_dir) == global_batches(unbroken.run_dir)


def test_torchrun_trains_as_the_deepspeed_launcher_does(site: Path, unbroken: Trainer) -> None:
    torchrun = Trainer(site, site.parent / "torchrun", *FLAGS, "--set=mesh.data=2", world=2, launcher="torchrun")
    numbers = ([x["loss"] for x in t.steps()] for t in (torchrun.finish(), unbroken))
    ours, alone = numbers
    assert ours[:4] == pytest.approx(alone[:4], rel=1e-5, abs=1e-5)
    assert global_batches(torchrun.run_dir) == global_batches(unbroken.run_dir)


def test_processes_that_do_not_fit_the_mesh_are_refused(site: Path) -> None:
    trainer = Trainer(site, site.parent / "misfit", "--set=mesh.data=2")
    assert trainer.process.wait(120) != 0
    assert "must equal the number of processes, 1" in trainer.log


def test_damaged_members_train_to_the_end(tmp_path: Path) -> None:
    daemon = damaged_run(tmp_path)
    try:
        trainer = Trainer(daemon.folder / "run.yaml", tmp_path / "run", *FLAGS).finish()
        proof = verify(daemon.folder / "run.yaml", trainer.run_dir)
        assert proof.returncode == 0, proof.stdout + proof.stderr
        assert all(x["loss"] == x["loss"] for x in trainer.steps())
        for reason in ("truncated", "missing_text", "junk_image", "unknown_field", "duplicate_member"):
            assert daemon.log.count(reason) >= 1, daemon.log
    finally:
        daemon.kill()


def damaged_run(folder: Path) -> Daemon:
    """A daemon over good samples among which every kind of damage lies."""
    good = [m for n in range(64) for m in sample(f"k{n:04d}", n)]
    picture = dict(sample("x", 0))["x.jpg"]
    caption = b"a caption"
    bad = [
        *[("a0.jpg", picture)],
        *[("a1.jpg", picture[: len(picture) // 2]), ("a1.txt", caption)],
        *[("a2.jpg", b"<html>no picture</html>"), ("a2.txt", caption)],
        *[("a3.05.png", picture), ("a3.txt", caption)],
        *[("a4.jpg", picture), ("a4.jpg", picture), ("a4.txt", caption)],
        *[("a5.wav", tone(1.0, hz=0.0)), ("a5.txt", caption)],
        *[("a6.wav", tone(0.1)), ("a6.txt", caption)],
    ]
    (folder / "data").mkdir()
    write_tar(folder / "data" / "good.tar", good)
    whole = write_tar(folder / "data" / "bad.tar", [*bad, *sample("z1", 2), *sample("z2", 2)])
    with whole.open("rb+") as file:
        file.truncate(whole.stat().st_size - 12_000)
    config, _ = make_run_file(folder)
    return Daemon(config).wait_ready()
