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


def test_zero_two_with_tensor_parallelism_is_refused_with_the_rule(tmp_path: Path) -> None:
    assert "is not proven with tensor parallelism" in str(refusal(tmp_path, "mesh.tensor=2", "train.zero_stage=2"))
