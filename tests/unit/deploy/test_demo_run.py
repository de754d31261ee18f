"""Laws of the demo's own run."""

from pathlib import Path

import pytest

from deploy.demo import run


def test_a_second_demo_leaves_the_first_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "RUN", tmp_path / "runs" / "demo")
    log = run.RUN / "loader.log"
    with run.alone():
        log.parent.mkdir()
        log.touch()
        with pytest.raises(SystemExit, match=r"another demo is running in .*wait for its end, or stop it"):
            run.main(data=tmp_path / "data")
        assert log.exists()
    with run.alone():
        pass
