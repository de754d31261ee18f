"""No collective gives up on a rank before that rank gives up on its loader or its disk, which it names."""

from pathlib import Path

from tests.support.ranks import run_ranks
from tests.support.runs import run_file

WAIT_S = 2000


def test_every_group_of_ranks_waits_longer_than_a_rank_for_its_loader(tmp_path: Path) -> None:
    config = run_file(tmp_path, "part-{0..0}.tar", train={"wait_s": WAIT_S})
    task = {"config": str(config), "sets": ["mesh.pipe=2", "model.decoder.tied=true"]}
    reports = run_ranks("tests.support.timeout_program", 2, tmp_path / "out", task)
    assert all(len(report) > 3 and min(report) > 2 * WAIT_S for report in reports), reports
