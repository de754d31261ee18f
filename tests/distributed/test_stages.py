"""Wherever a pipeline is cut, by hand or by measured time, it trains as one process does, and tells how it was cut."""

from pathlib import Path

import pytest
import yaml

from tests.support.layouts import SGD, Alone, differences, run_layout

TABLE = "mesh.stages=[{layers: encode..decoder.1}, {layers: head, active_experts: 1}]"
MEASURED = "mesh.balance=measured"
ASK = "write under mesh:\n"

pytestmark = pytest.mark.slow


def told(folder: Path) -> str:
    """The `stages` that rank 0 says would cut like this again."""
    lines = (folder / "out" / "rank-0.log").read_text().split(ASK)[-1].splitlines()
    return "\n".join([lines[0], *(line for line in lines[1:] if line.startswith("  - "))])


@pytest.mark.parametrize("tensor", [1, 2])
def test_own_and_measured_cuts_train_as_one_process_does(alone: Alone, tmp_path: Path, tensor: int) -> None:
    recomputed = [*SGD, MEASURED, "train.recompute={decoder: 1}", "train.freeze=[vision]"]
    tied = [*SGD, MEASURED, "model.decoder.tied=true"]
    cases = {"table": [*SGD, TABLE], "recomputed": recomputed, "tied": tied}
    whole, cut = alone.runs(cases), run_layout(tmp_path, (2, 1, tensor), cases)
    assert {name: max(differences(cut[name], whole[name])) > 1e-5 for name in cases} == dict.fromkeys(cases, False)


def test_a_measured_table_goes_into_the_run_file_and_weighs_time_not_parameters(tmp_path: Path) -> None:
    """An embedding of many rows takes no time, a head of as many does: parameters alone would part them evenly."""
    wide = [*SGD, "model.decoder.vocab=40960"]
    measured = run_layout(tmp_path / "measured", (2, 1, 1), {"case": [*wide, MEASURED]})["case"]
    text = told(tmp_path / "measured")
    stages = yaml.safe_load(text)["stages"]
    assert stages == [{"layers": "encode..decoder.1"}, {"layers": "head"}]
    assert "share of time" in (tmp_path / "measured" / "out" / "rank-0.log").read_text()
    pasted = run_layout(
        tmp_path / "pasted",
        (2, 1, 1),
        {"case": [*wide, f"mesh.stages={yaml.safe_dump(stages, default_flow_style=True)}"]},
    )["case"]
    assert told(tmp_path / "pasted") == text
    assert (pasted.losses, pasted.norms) == (measured.losses, measured.norms)
    assert differences(pasted, measured).weights == 0
    by_parameters = run_layout(tmp_path / "parameters", (2, 1, 1), {"case": wide}, steps=1)
    assert by_parameters and yaml.safe_load(told(tmp_path / "parameters"))["stages"][0] == {"layers": "encode"}
