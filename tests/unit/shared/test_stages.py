"""A stage table says where a pipeline is cut; what is not one pipeline of the whole model is refused in words."""

from pathlib import Path
from typing import Any

import pytest

from shared.config import load
from shared.errors import ConfigError
from shared.stages import layer_names, stage_layers, table_bounds
from tests.support.runs import run_config, run_file

DEPTH4 = {"decoder": {"depth": 4}}
MIXED = {"decoder": {"depth": 4, "experts": 4, "experts_per_token": 2, "expert_every": 2}}
GOOD = ["encode", "decoder.0..decoder.2", "decoder.3..head"]


def refusal(folder: Path, stages: list[dict[str, Any]], model: dict[str, Any], **mesh: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        run_config(folder, "x.tar", model=model, mesh={"pipe": len(stages), "stages": stages, **mesh})
    return str(caught.value)


def rows(*layers: str, **last: Any) -> list[dict[str, Any]]:
    """A table of these layers; `last` are further columns of its last row."""
    found: list[dict[str, Any]] = [{"layers": each} for each in layers]
    found[-1] |= last
    return found


def test_a_table_gives_its_own_cuts_and_is_written_as_it_is_read(tmp_path: Path) -> None:
    config = run_config(tmp_path, "x.tar", model=DEPTH4, mesh={"pipe": 3, "stages": rows(*GOOD)})
    assert table_bounds(config) == [0, 1, 4, 6]
    assert stage_layers(layer_names(4), [0, 1, 4, 6]) == GOOD


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (["encode", "decoder.4..head"], "names a layer that is not there; there are encode, decoder.0 to decoder.3"),
        (["encode", "decoder.1..head"], r"must begin with decoder.0"),
        (["encode..decoder.0", "decoder.0..head"], "must begin with decoder.1"),
        (["decoder.0..head", "encode"], "must begin with encode"),
        (["encode", "decoder.0..decoder.3"], r"ends with decoder.3) must end with head on the last stage"),
        (["encode..head", "head"], "must begin with nothing: head is already on an earlier stage"),
        (["encode", "head..decoder.0"], "ends before it begins; write decoder.0..head"),
        (["encode", "decoder.0...head"], "names a layer that is not there"),
    ],
)
def test_layers_left_out_doubled_or_out_of_order_are_refused(tmp_path: Path, layers: list[str], words: str) -> None:
    assert words in refusal(tmp_path, rows(*layers), DEPTH4)


def test_a_table_of_another_number_of_stages_is_refused(tmp_path: Path) -> None:
    text = refusal(tmp_path, rows(*GOOD), DEPTH4, pipe=2)
    assert text == "mesh.pipe (2) must be the number of stages in mesh.stages, 3; set 3, or change the table"


def test_a_table_and_measured_cuts_exclude_each_other(tmp_path: Path) -> None:
    assert "which mesh.stages says already" in refusal(tmp_path, rows(*GOOD), DEPTH4, balance="measured")


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (
            {"micro_batch_tokens": 512},
            "must be data.batch.tokens, 256, on every stage: a pipeline hands micro-batches on",
        ),
        ({"tensor": 2}, "must be mesh.tensor, 1, on every stage: DeepSpeed's grid of ranks has as many on each"),
        (
            {"active_experts": 4},
            "must be 2: its layers have experts, and model.decoder.experts_per_token is one number",
        ),
    ],
)
def test_what_deepspeed_cannot_run_stage_by_stage_is_refused(
    tmp_path: Path, column: dict[str, int], words: str
) -> None:
    text = refusal(tmp_path, rows(*GOOD, **column), MIXED)
    assert text.startswith(f"mesh.stages[2].{next(iter(column))} (") and words in text and "; leave it out, or" in text


def test_a_stage_without_experts_has_one_active_network(tmp_path: Path) -> None:
    assert "must be 1: its layers have no experts" in refusal(
        tmp_path, rows("encode..decoder.3", "head", active_experts=2), MIXED
    )


def test_columns_that_say_what_the_run_is_are_taken(tmp_path: Path) -> None:
    said = {"micro_batch_tokens": 256, "tensor": 1, "active_experts": 2}
    stages = [{"layers": "encode", "active_experts": 1}, {"layers": "decoder.0..head", **said}]
    assert run_config(tmp_path, "x.tar", model=MIXED, mesh={"pipe": 2, "stages": stages}).mesh.stages[1].tensor == 1


def test_a_misspelt_column_is_told_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean layers"):
        load(run_file(tmp_path, "x.tar", mesh={"pipe": 1, "stages": [{"layer": "encode..head"}]}))
