"""Laws of sharing a GPU: MPS is found, started, told of, used again and stopped; without it all goes on as ever."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from dataloader_svc import mps
from dataloader_svc.metrics import parse
from dataloader_svc.mps import Control, sharing
from shared import mps as places
from shared.errors import ConfigError
from shared.sections import LoaderSection
from shared.telemetry import REGISTRY
from tests.support import mps_stand_in
from tests.support.daemons import alive, wait_until

AUTO, START, OFF = (LoaderSection(device="gpu", mps=how) for how in ("auto", "start", "off"))  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Path]:
    """A machine with the program on PATH, and folders of its own for CUDA's and our control daemon."""
    monkeypatch.setenv("PATH", mps_stand_in.install(tmp_path / "bin"))
    monkeypatch.delenv(places.PIPE_VARIABLE, raising=False)
    monkeypatch.setattr(places, "ROOT", tmp_path)
    monkeypatch.setattr(places, "CUDA_PIPE_DIR", tmp_path / "nvidia-mps")
    monkeypatch.setattr(mps, "ASK_S", 1.0)
    monkeypatch.setattr(mps, "QUIT_S", 0)
    monkeypatch.setattr(mps, "LEAVE_S", 0.5)
    monkeypatch.setattr(logging.getLogger("millstream"), "propagate", True)
    caplog.set_level(logging.INFO, "millstream")
    yield tmp_path
    for left in tmp_path.rglob("pid"):
        with contextlib.suppress(OSError, ValueError):
            mps_stand_in.end(int(left.read_text()))


def own_pipe() -> Path:
    return places.own_dir() / "pipe"


def told() -> list[str]:
    """How the GPU is shared, as the metrics page says."""
    page = generate_latest(REGISTRY).decode()
    return [labels["how"] for name, labels, _ in parse(page) if name == "loader_gpu_sharing"]


def test_cpu_decode_asks_nobody_and_changes_nothing(folder: Path) -> None:
    with sharing(LoaderSection(mps="start")) as environment:
        assert environment == {}
        assert told() == []
    assert not places.own_dir().exists()


def test_without_mps_one_line_says_what_that_costs(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with sharing(AUTO):
        assert told() == ["time_slices"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "time slices" in line and "3 to 16 %" in line and "loader.mps=start" in line
    assert told() == []


def test_a_control_daemon_of_others_is_used_and_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = Control(places.CUDA_PIPE_DIR)
    theirs.start()
    for loader in (AUTO, AUTO):
        with sharing(loader) as environment:
            assert environment == {"CUDA_MPS_PIPE_DIRECTORY": str(places.CUDA_PIPE_DIR)}
            assert told() == ["mps"]
    assert theirs.answers()
    assert f"export CUDA_MPS_PIPE_DIRECTORY={places.CUDA_PIPE_DIR}" in caplog.text


def test_the_folder_of_the_environment_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(places.PIPE_VARIABLE, str(folder / "elsewhere"))
    with sharing(START) as environment:
        assert environment == {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "elsewhere")}
        assert Control(folder / "elsewhere").answers()
    assert not Control(folder / "elsewhere").answers()


def test_what_was_started_is_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with sharing(START) as environment:
        started = mps_stand_in.pid(own_pipe())
        assert environment == {"CUDA_MPS_PIPE_DIRECTORY": str(own_pipe())}
        assert told() == ["mps"]
        assert alive(started)
    assert not alive(started)
    assert list(own_pipe().iterdir()) == []


def test_one_that_does_not_obey_is_stopped_too(folder: Path) -> None:
    with sharing(START):
        started = mps_stand_in.pid(own_pipe())
        (own_pipe() / "stubborn").touch()
    wait_until(lambda: not alive(started), "the control daemon is gone")


def test_daemons_that_start_together_share_one(folder: Path) -> None:
    with ThreadPoolExecutor(4) as threads, contextlib.ExitStack() as stack:
        for context in [sharing(START) for _ in range(4)]:
            threads.submit(stack.enter_context, context)
        threads.shutdown()
        (process,) = Control(own_pipe())._processes()
        assert process == mps_stand_in.pid(own_pipe())
    assert not alive(process)


def test_it_is_stopped_when_the_daemon_fails_too(folder: Path) -> None:
    with pytest.raises(RuntimeError), sharing(START):
        started = mps_stand_in.pid(own_pipe())
        raise RuntimeError
    assert not alive(started)


def test_one_that_a_killed_daemon_left_is_used_again_and_stopped(folder: Path) -> None:
    Control(own_pipe()).start()
    left = mps_stand_in.pid(own_pipe())
    with sharing(START):
        assert mps_stand_in.pid(own_pipe()) == left
    assert not alive(left)


def test_what_a_killed_control_daemon_left_is_replaced(folder: Path) -> None:
    Control(own_pipe()).start()
    mps_stand_in.end(dead := mps_stand_in.pid(own_pipe()))
    assert (own_pipe() / "control").exists()
    with sharing(START):
        assert mps_stand_in.pid(own_pipe()) != dead
        assert told() == ["mps"]


def test_one_that_does_not_answer_is_ended_and_replaced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    Control(own_pipe()).start()
    mute = mps_stand_in.pid(own_pipe())
    (own_pipe() / "mute").touch()
    with sharing(START):
        assert mps_stand_in.pid(own_pipe()) != mute
        assert not alive(mute)
    assert f"process {mute}" in caplog.text


def test_one_that_does_not_answer_is_no_mps(folder: Path) -> None:
    Control(places.CUDA_PIPE_DIR).start()
    (places.CUDA_PIPE_DIR / "mute").touch()
    with sharing(AUTO):
        assert told() == ["time_slices"]
    assert alive(mps_stand_in.pid(places.CUDA_PIPE_DIR))


def test_a_trainer_that_is_a_client_keeps_its_gpu(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with sharing(START):
        (own_pipe() / "clients").write_text(f"{os.getpid()}\n")
    assert Control(own_pipe()).answers()
    assert str(os.getpid()) in caplog.records[-1].getMessage()
    (own_pipe() / "clients").unlink()
    with sharing(START):
        pass
    assert not Control(own_pipe()).answers()


def test_a_client_that_is_just_leaving_is_waited_for(folder: Path) -> None:
    with ThreadPoolExecutor(1) as thread, sharing(START):
        (own_pipe() / "clients").write_text("4711\n")
        thread.submit(lambda: (time.sleep(0.2), (own_pipe() / "clients").unlink()))
    assert not Control(own_pipe()).answers()


def test_off_keeps_workers_out_of_what_is_there(folder: Path) -> None:
    Control(places.CUDA_PIPE_DIR).start()
    with sharing(OFF) as environment:
        assert told() == ["time_slices"]
        assert not Path(environment["CUDA_MPS_PIPE_DIRECTORY"]).exists()


def test_a_start_that_cannot_be_done_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "bin" / "nvidia-cuda-mps-control"
    program.write_text("#!/bin/bash\necho no GPU here; exit 3\n")
    with pytest.raises(ConfigError, match=r"loader\.mps \(start\) cannot be done: .* gave 3 \(no GPU here\); see"):
        sharing(START).__enter__()
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(ConfigError, match=r"loader\.mps \(start\) needs nvidia-cuda-mps-control.*set auto"):
        sharing(START).__enter__()


def test_without_the_program_a_pipe_that_is_there_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container into which a node's pipe directory is mounted."""
    places.CUDA_PIPE_DIR.mkdir()
    (places.CUDA_PIPE_DIR / "control").touch()
    monkeypatch.setenv("PATH", str(folder))
    with sharing(AUTO):
        assert told() == ["mps"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    own_pipe().mkdir(parents=True)
    os.chown(places.own_dir(), 54_321, -1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        sharing(START).__enter__()


def test_a_trainer_of_the_same_run_file_looks_where_the_daemon_started_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for loader in (AUTO, OFF, LoaderSection(mps="start")):
        places.join(loader)
        assert places.PIPE_VARIABLE not in os.environ
    with monkeypatch.context() as patch:
        patch.setenv(places.PIPE_VARIABLE, "")
        places.join(START)
        assert os.environ[places.PIPE_VARIABLE] == str(own_pipe())
    monkeypatch.setenv(places.PIPE_VARIABLE, str(folder))
    places.join(START)
    assert os.environ[places.PIPE_VARIABLE] == str(folder)
