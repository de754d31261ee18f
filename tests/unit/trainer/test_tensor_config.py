"""Tensor degrees and ZeRO stages that cannot work together with the model are refused in words."""

from pathlib import Path
from typing import Any

import pytest

from shared.config import load
from shared.errors import ConfigError
from tests.support.runs import run_file


def refusal(tmp_path: Path, *overrides: str, **changes: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(run_file(tmp_path, "x.tar", **changes), overrides)
    return caught.value


@pytest.mark.parametrize(("name", "size"), [("heads", 6), ("kv_heads", 1), ("mlp", 98), ("vocab", 322)])
def test_a_tensor_degree_that_cannot_share_a_size_is_refused_with_it(tmp_path: Path, name: str, size: int) -> None:
    decoder = {"heads": 4, "kv_heads": 4, "dim": 48, "mlp": 96, "vocab": 320}
    decoder |= {"heads": 6, "kv_heads": 6} if name == "heads" else {name: size}
    error = refusal(tmp_path, "mesh.tensor=4", model={"decoder": decoder})
    assert f"must divide model.decoder.{name}, {size}" in str(error)


@pytest.mark.parametrize("option", ["sequence_parallel", "encoder_data_parallel"])
def test_what_a_tensor_group_shares_out_needs_one(tmp_path: Path, option: str) -> None:
    text = str(refusal(tmp_path, f"mesh.{option}=true"))
    assert f"mesh.{option} (True) needs mesh.tensor of 2 or more" in text and "set false, or raise mesh.tensor" in text


def test_a_pack_that_cannot_be_shared_out_is_refused_with_one_that_can(tmp_path: Path) -> None:
    decoder = {"heads": 6, "kv_heads": 3, "mlp": 96, "vocab": 321}
    text = str(refusal(tmp_path, "mesh.tensor=3", "mesh.sequence_parallel=true", model={"decoder": decoder}))
    assert "must divide data.batch.tokens, 256" in text and "set data.batch.tokens to a multiple of 192" in text


def test_zero_two_with_tensor_parallelism_is_refused_with_the_rule(tmp_path: Path) -> None:
    assert "is not proven with tensor parallelism" in str(refusal(tmp_path, "mesh.tensor=2", "train.zero_stage=2"))
