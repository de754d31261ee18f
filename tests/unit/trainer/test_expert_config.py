"""Experts that cannot be routed to, and expert degrees that cannot share them out, are refused in words."""

from pathlib import Path
from typing import Any

import pytest

from shared.config import load
from shared.errors import ConfigError
from shared.mesh import Mesh
from tests.support.runs import run_config, run_file
from trainer.manifest import layout_of
from trainer.parallel.expert import expert_lines, replica_lines

EXPERTS = {"decoder": {"experts": 4, "experts_per_token": 2}}
ROUND = {"batch": {"micro_batches": 8, "round": 8}}


def refusal(tmp_path: Path, *overrides: str, **changes: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(run_file(tmp_path, "x.tar", **{"model": EXPERTS, "data": ROUND, **changes}), overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["mesh.data=2", "mesh.expert=4"], "mesh.expert (4) must divide mesh.data, 2: an expert group is a part of"),
        (["mesh.data=8", "mesh.expert=8"], "mesh.expert (8) must divide model.decoder.experts, 4: each rank of a"),
        (["mesh.data=2", "mesh.expert=2", "model.decoder.experts=0"], "needs experts to share out"),
        (["mesh.data=2", "mesh.expert=2", "train.zero_stage=2"], "is not proven with expert parallelism; set 0 or 1"),
        (
            ["mesh.data=2", "mesh.expert=2", "train.offload_optimizer=true"],
            "is not proven with expert parallelism; set",
        ),
        (
            ["mesh.tensor=2", "model.decoder.expert_mlp=63"],
            "mesh.tensor (2) must divide the inner width of an expert, 63",
        ),
        (["mesh.expert=0"], "mesh.expert (0) must be at least 1"),
        (["model.decoder.experts=-1"], "model.decoder.experts (-1) must be at least 0"),
        (["model.decoder.experts_per_token=5"], "must be at most model.decoder.experts, 4"),
        (["model.decoder.experts_per_token=0"], "must be at least 1"),
        (["model.decoder.expert_every=3"], "must be at most model.decoder.depth, 2, or no block has experts"),
        (["model.decoder.expert_every=0"], "must be at least 1"),
        (["model.decoder.capacity_factor=-1.0"], "must be at least 0"),
        (["model.decoder.balance_loss=.nan"], "model.decoder.balance_loss (nan) must be a finite number"),
    ],
)
def test_each_rule_is_said_in_words(tmp_path: Path, overrides: list[str], words: str) -> None:
    assert words in refusal(tmp_path, *overrides)


def test_a_degree_that_does_not_fit_is_answered_with_those_that_do(tmp_path: Path) -> None:
    text = refusal(tmp_path, "mesh.data=4", "mesh.expert=8", "model.decoder.experts=8")
    assert "set one of [1, 2, 4], or raise mesh.data" in text


def test_expert_groups_are_neighbouring_data_ranks_of_one_stage() -> None:
    mesh = Mesh(pipe=2, data=4, expert=2)
    assert expert_lines(mesh) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert replica_lines(mesh) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert expert_lines(Mesh(data=2, tensor=2, expert=2)) == [[0, 2], [1, 3]]


def test_a_checkpoint_says_its_expert_degree(tmp_path: Path) -> None:
    config = run_config(tmp_path, "x.tar", model=EXPERTS, mesh={"data": 2, "expert": 2})
    assert layout_of(config) == "pipe 1, data 2, tensor 1, expert 2, ZeRO 1"
