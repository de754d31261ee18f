"""A fine-tune is the one that `transformers` makes: from the same file, on the same batches, step for step.

`Trainer` gets every sample as a padded row of its own, four micro-batches a step of 5 to 205 label tokens, and counts
label tokens over all of them itself. The engine gets the same samples packed, in one process of its own.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shared.config import load
from tests.support.hugging import saved
from tests.support.hugging_training import Record, train_with_transformers
from tests.support.packs import WRITTEN
from tests.support.ranks import run_ranks
from tests.support.runs import run_file
from trainer.models.hf import FamilyName, to_hf
from trainer.models.hf_config import section_from_hf
from trainer.weights import import_weights

MODELS: dict[str, FamilyName] = {"llama": "llama", "qwen2": "qwen2", "llama-tied": "llama", "qwen2-tied": "qwen2"}
STEPS = 24
TRAIN: dict[str, Any] = {
    "steps": STEPS,
    "optim": {"lr": 1e-2, "warmup_steps": 4, "clip": 0.5, "weight_decay": 0.1, "betas": [0.9, 0.95]},
}


pytestmark = pytest.mark.slow


def case(name: str, folder: Path) -> list[str]:
    """Overrides for a run that starts from a saved model."""
    model: Any = saved(name, folder / name)
    section = msgspec.to_builtins(section_from_hf(model.config.to_dict()))
    sets = [f"model.decoder={json.dumps(section)}", f"train.init_from={folder / name}.safetensors"]
    import_weights(load(folder / "run.yaml", sets), {"decoder": folder / name}, folder / f"{name}.safetensors")
    return sets


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("training")
    run_file(found, "part-{0..0}.tar", train=TRAIN)
    return found


@pytest.fixture(scope="module")
def cases(folder: Path) -> dict[str, list[str]]:
    return {name: case(name, folder) for name in MODELS}


@pytest.fixture(scope="module")
def ours(folder: Path, cases: dict[str, list[str]]) -> dict[str, Record]:
    """The engine's runs, weights by transformers' names."""
    task = {"config": str(folder / "run.yaml"), "cases": cases, "plans": "WRITTEN", "steps": STEPS}
    (reports,) = run_ranks("tests.support.step_program", 1, folder / "out", task)
    found = {}
    for name, sets in cases.items():
        with np.load(folder / "out" / f"{name}-0.npz") as file:
            state = {key: torch.from_numpy(file[key]) for key in file.files}
        weights = to_hf(state, MODELS[name], load(folder / "run.yaml", sets).model.decoder)
        found[name] = Record(reports[name]["losses"], reports[name]["norms"], weights)
    return found


@pytest.fixture(scope="module")
def theirs(folder: Path, cases: dict[str, list[str]]) -> dict[str, Record]:
    configs = {name: load(folder / "run.yaml", sets) for name, sets in cases.items()}
    return {
        name: train_with_transformers(folder / name, config, WRITTEN, folder / f"{name}-trainer")
        for name, config in configs.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_a_fine_tune_is_that_of_transformers_step_for_step(
    name: str, ours: dict[str, Record], theirs: dict[str, Record]
) -> None:
    found, wanted = ours[name], theirs[name]
    assert len(found.losses) == len(wanted.losses) == len(wanted.norms) == STEPS
    assert wanted.losses[-1] < wanted.losses[0] - 0.25
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.norms, wanted.norms, rtol=1e-5)
    for key, tensor in found.weights.items():
        torch.testing.assert_close(tensor, wanted.weights[key], rtol=0, atol=5e-4, msg=lambda text, key=key: key + text)
