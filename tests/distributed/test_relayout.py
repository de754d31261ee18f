"""A checkpoint of one layout goes on in any other, as if the run had never stopped; and back, to the last bit.

Saved at pipe 2 x data 2 after two steps, resumed elsewhere for one more. Compared with the unbroken run are losses,
gradient norms, and weights and moments after the last step, as whole tensors. What was loaded is saved again at once:
that copy must be the same numbers, bit for bit, however they are cut.
"""

from pathlib import Path

import pytest
import torch

from tests.support.layouts import SGD, STRAYED, Run, Weights, differences, run_layout, strayed
from trainer.source import Source

MOMENTUM = [*SGD, "train.optim.momentum=0.9"]
CASES = {"adamw": [], "sgd": MOMENTUM, "bf16": ["train.precision=bf16"]}
MOMENTS = {"adamw": {"exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}, "bf16": {"exp_avg", "exp_avg_sq"}}
TOLERANCE = {"bf16": 3e-3}
MOMENT_TOLERANCE = {"bf16": 5e-2}
HOME = (2, 2, 1)
LAYOUTS = {
    "one-process": ((1, 1, 1), 0),
    "tensor2": ((1, 1, 2), 0),
    "pipe2-tensor2": ((2, 1, 2), 1),
    "data2": ((1, 2, 1), 1),
    "data2-zero2": ((1, 2, 1), 2),
    "data2-zero3": ((1, 2, 1), 3),
}
SAVED, STEPS = 2, 3

pytestmark = pytest.mark.slow


def cases(zero: int) -> dict[str, list[str]]:
    """The cases at a ZeRO stage; bf16 needs one, and stands for no other here."""
    return {
        name: [*sets, f"train.zero_stage={max(1, zero) if name == 'bf16' else zero}"]
        for name, sets in CASES.items()
        if name != "bf16" or zero < 2
    }


def open_case(folder: Path, case: str, step: int) -> Source:
    """A checkpoint of `run_layout`'s."""
    return Source(folder / case / f"step-{step:08d}")


def tensors(source: Source) -> dict[str, torch.Tensor]:
    """Everything that has a place in the model, whole."""
    return {key: source.whole(key) for key in source.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def unbroken(home: Path) -> dict[str, Run]:
    """The run at home; its checkpoints lie in `home`."""
    folders = {"checkpoints": f"{home}/saved/{{case}}", "ends": f"{home}/ends/{{case}}"}
    return run_layout(home, HOME, cases(1), steps=STEPS, save_every=SAVED, **folders)


OFFLOADED = {
    "adamw": [],
    "sgd": MOMENTUM,
    "bf16": ["train.precision=bf16"],
    "zero2": ["train.zero_stage=2"],
    "zero3": ["train.zero_stage=3"],
}


@pytest.mark.parametrize("to", ["true", "false"])
@pytest.mark.parametrize("mesh", [(1, 2, 1), (2, 1, 1)], ids=["data2", "pipe2"])
def test_the_optimizer_may_move_to_the_cpu_and_back_between_save_and_resume(
    tmp_path: Path, mesh: tuple[int, int, int], to: str
) -> None:
    sets = {name: each for name, each in OFFLOADED.items() if mesh[0] == 1 or name[:4] != "zero"}
    before = {name: [*each, f"train.offload_optimizer={to == 'false'}"] for name, each in sets.items()}
    after = {name: [*each, f"train.offload_optimizer={to}"] for name, each in sets.items()}
    saved = {"checkpoints": f"{tmp_path}/saved/{{case}}"}
    unbroken = run_layout(tmp_path / "a", mesh, before, steps=STEPS, save_every=SAVED, **saved)
    resumed = run_layout(tmp_path / "b", mesh, after, steps=STEPS, resume=True, **saved)
    found = {case: (run.first, max(differences(run, unbroken[case]))) for case, run in resumed.items()}
    assert {case: far for case, far in found.items() if far[0] != SAVED or far[1] > TOLERANCE.get(case, 1e-5)} == {}


def resume(folder: Path, mesh: tuple[int, int, int], zero: int, saved: Path) -> dict[str, Run]:
    """The runs that go on from `saved`."""
    folders = {"checkpoints": saved, "copies": folder / "copies", "ends": folder / "ends"}
    paths = {key: f"{path}/{{case}}" for key, path in folders.items()}
    return run_layout(folder, mesh, cases(zero), steps=STEPS, resume=True, **paths)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_goes_on_in_another_layout(home: Path, unbroken: dict[str, Run], tmp_path: Path, layout: str) -> None:
    for case, run in resume(tmp_path, *LAYOUTS[layout], home / "saved").items():
        tolerance, wanted = TOLERANCE.get(case, 1e-5), unbroken[case]
        assert run.first == SAVED
        assert run.losses == pytest.approx(wanted.losses[SAVED:], rel=tolerance), case
        assert run.norms == pytest.approx(wanted.norms[SAVED:], rel=tolerance), case
        hold_same(open_case(home / "saved", case, SAVED), open_case(tmp_path / "copies", case, SAVED), case)
        ends = [tensors(open_case(folder / "ends", case, STEPS)) for folder in (tmp_path, home)]
        assert {
            key: far for key, tensor in ends[0].items() if (far := excess(case, key, tensor, ends[1][key])) > 1
        } == {}
        moved = [weights(each) for each in (*ends, tensors(open_case(home / "saved", case, SAVED)))]
        assert strayed(*moved) <= STRAYED["bf16" if case == "bf16" else "fp32"], case


def weights(held: dict[str, torch.Tensor]) -> Weights:
    """Of all that a checkpoint holds."""
    return {key: tensor.float().numpy() for key, tensor in held.items() if key.startswith("weight/")}


def excess(case: str, key: str, found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference over its bound; moments are compared relative to the tensor's largest."""
    bound = TOLERANCE.get(case, 1e-5)
    if not key.startswith("weight/"):
        bound = MOMENT_TOLERANCE.get(case, 1e-5) * float(wanted.abs().max())
    return float((found - wanted).abs().max()) / bound


def hold_same(saved: Source, copy: Source, case: str) -> None:
    """Bit by bit, the numbers of steps too."""
    one, other = tensors(saved), tensors(copy)
    assert one.keys() == other.keys()
    assert [key for key, tensor in one.items() if not torch.equal(tensor, other[key])] == []
    trained = [key.partition("/")[2] for key in one if key.startswith("weight/")]
    assert all(set(saved.kinds(name)) == {"weight", *MOMENTS[case]} for name in trained)
    wanted = None if case == "sgd" else SAVED
    assert {saved.updates(name) for name in trained} == {copy.updates(name) for name in trained} == {wanted}


def test_there_and_back_again_is_the_unbroken_run_bit_for_bit(
    home: Path, unbroken: dict[str, Run], tmp_path: Path
) -> None:
    resume(tmp_path / "there", *LAYOUTS["pipe2-tensor2"], home / "saved")
    back = resume(tmp_path / "back", HOME, 1, tmp_path / "there" / "copies")
    for case, run in back.items():
        assert (run.losses, run.norms) == (unbroken[case].losses[SAVED:], unbroken[case].norms[SAVED:])
        ends = [tensors(open_case(folder / "ends", case, STEPS)) for folder in (tmp_path / "back", home)]
        assert all(torch.equal(tensor, ends[1][key]) for key, tensor in ends[0].items())
