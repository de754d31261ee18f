"""Expert parallelism, alone, in a pipeline and with replicas, trains as one process does.

Auxiliary losses are far larger here than anyone would set them, so that a wrong scale shows. Each layout is launched
once on real processes over gloo; three global batches each with every modality set, an empty pack and an empty
caption; clipping is always active, so that an error of the gradient norm reaches the weights.
"""

import pytest

from tests.support.layouts import Run, differences, run_layout

SGD = ["train.optim.name=sgd", "train.optim.lr=0.1"]
EXPERTS = ["experts=4", "experts_per_token=2", "expert_mlp=64", "balance_loss=0.5", "router_z_loss=0.1"]
MODEL = [f"model.decoder.{each}" for each in EXPERTS]
CASES = {
    "adamw": MODEL,
    "sgd": [*MODEL, *SGD],
    "sgd-zero0": [*MODEL, *SGD, "train.zero_stage=0"],
    "adamw-zero0": [*MODEL, "train.zero_stage=0"],
    "capacity": [*MODEL, *SGD, "model.decoder.capacity_factor=0.5"],
    "every-second": [*MODEL, *SGD, "model.decoder.expert_every=2"],
    "every-second-zero0": [*MODEL, *SGD, "model.decoder.expert_every=2", "train.zero_stage=0"],
    "top-1": [*MODEL, *SGD, "model.decoder.experts_per_token=1"],
    "bf16": [*MODEL, "train.precision=bf16"],
}
LAYOUTS = {
    "expert2": (1, 2, 1, 2),
    "pipe2": (2, 1, 1, 1),
    "pipe2-expert2": (2, 2, 1, 2),
    "data4-expert2": (1, 4, 1, 2),
}
TOLERANCE = {"bf16": 3e-3}

Runs = dict[str, Run]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The reference: one process."""
    return run_layout(tmp_path_factory.mktemp("alone"), (1, 1, 1), CASES)


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Every case in one layout, weights merged; whatever several ranks hold is equal on them to the last bit."""
    return run_layout(tmp_path_factory.mktemp("layout"), LAYOUTS[request.param], CASES)


def test_every_layout_trains_as_one_process_does(alone: Runs, layout: Runs) -> None:
    found = {case: differences(run, alone[case]) for case, run in layout.items()}
    wrong = {case: each for case, each in found.items() if max(each) > TOLERANCE.get(case, 1e-5)}
    assert not wrong
