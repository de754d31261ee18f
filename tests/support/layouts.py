"""One run in any layout: start it, merge what its ranks hold into whole weights, and compare two of them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.torch import save_file

from shared.config import load
from shared.mesh import Coords, Mesh
from tests.support.ranks import run_ranks
from tests.support.runs import run_file
from trainer.models import build
from trainer.parallel import expert, tensor

BATCH = {"batch": {"micro_batches": 8, "round": 4}}
STEPS = 2
"""Enough for what one step leaves to the next: weights, moments, gradient buffers."""

SGD = ["train.optim.name=sgd", "train.optim.lr=0.3"]
"""Adam hides a constant error in a gradient's scale, this does not."""

_EXPERTS = ["experts=4", "experts_per_token=2", "expert_mlp=64", "balance_loss=0.5", "router_z_loss=0.1"]
EXPERTS = [f"model.decoder.{each}" for each in _EXPERTS]
"""Auxiliary losses are far larger here than anyone would set them, so that a wrong scale shows."""

Weights = dict[str, NDArray[np.float32]]


STRAYED = {"fp32": 1e-3, "bf16": 0.15}
"""How far the change of all weights may be from the reference's, as a share of its length (see `strayed`).

A bf16 weight moves by a few of its last bits in so few steps, so a bound on single weights that rounding keeps is one
that a step of twice the length keeps too. Measured: at most 1e-5 and 0.06.
"""


class Run(msgspec.Struct):
    """What a run of some steps from `first` on reported, and its whole weights before any and after the last."""

    first: int
    losses: list[float]
    norms: list[float]
    start: Weights
    weights: Weights
    experts: list[dict[str, Any] | None]


class Differences(NamedTuple):
    """The largest between two runs: relative of losses and gradient norms, absolute of weights."""

    loss: float
    grad_norm: float
    weights: float


def run_layout(
    folder: Path,
    mesh: tuple[int, ...],
    cases: dict[str, list[str]],
    steps: int = STEPS,
    start_seed: int = 0,
    program: str = "tests.support.step_program",
    **task: Any,
) -> dict[str, Run]:
    """Case -> its run on pipe x data x tensor processes, data in groups of expert (the fourth, 1 if left out).

    With `start_seed`, `start.safetensors` holds weights of it for the first case's model.
    """
    config = make_run(folder)
    if start_seed:
        first = next(iter(cases.values()))
        start = build.build(load(config, [*first, f"train.seed={start_seed}"]), "sdpa").state_dict()
        save_file(start, folder / "start.safetensors")
    shape = shaped(mesh)
    cases = {name: [*sets, *degrees(mesh)] for name, sets in cases.items()}
    task = {"config": str(config), "cases": cases, "plans": "MIXED", "steps": steps, **task}
    reports = run_ranks(program, shape.world, folder / "out", task, timeout_s=900)
    assert all(report == reports[0] for report in reports)
    held = {each: whole_weights(folder / "out", each, shape) for name in cases for each in (name, f"{name} start")}
    return {name: Run(**reports[0][name], start=held[f"{name} start"], weights=held[name]) for name in cases}


class Alone:
    """Runs on one process, the references, each of which is made once for all tests of the session."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._held = folder, dict[tuple[str, ...], Run]()

    def runs(self, cases: dict[str, list[str]], steps: int = STEPS, plans: str = "MIXED") -> dict[str, Run]:
        """Case -> its run; what shares work out over ranks (`mesh.`) is left out of the overrides."""
        keys = {name: (plans, str(steps), *whole(sets)) for name, sets in cases.items()}
        missing = {name: [*key[2:]] for name, key in keys.items() if key not in self._held}
        if missing:
            made = run_layout(self._folder / str(len(self._held)), (1, 1, 1), missing, steps=steps, plans=plans)
            self._held |= {keys[name]: run for name, run in made.items()}
        return {name: self._held[key] for name, key in keys.items()}


def whole(sets: list[str]) -> list[str]:
    """Overrides for one process."""
    return [each for each in sets if not each.startswith("mesh.")]


def make_run(folder: Path) -> Path:
    """The run file of every layout, in `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    return run_file(folder, "part-{0..0}.tar", data=BATCH, train={"optim": {"clip": 0.25}})


def shaped(mesh: tuple[int, ...]) -> Mesh:
    """Degrees of pipe, data, tensor and expert, 1 for those left out."""
    return Mesh(**dict(zip(("pipe", "data", "tensor", "expert"), mesh, strict=False)))


def degrees(mesh: tuple[int, ...]) -> list[str]:
    """`shaped`, as overrides."""
    return [f"mesh.{axis}={degree}" for axis, degree in msgspec.structs.asdict(shaped(mesh)).items()]


def whole_weights(folder: Path, case: str, mesh: Mesh) -> Weights:
    """The weights of all ranks put together: stages side by side, slices end to end.

    Raises:
        AssertionError: ranks that hold the same numbers differ in a bit.
    """
    found: Weights = {}
    for pipe in range(mesh.pipe):
        for first in range(0, mesh.data, mesh.expert):
            group = [tensor_group(folder, case, mesh, pipe, data) for data in range(first, first + mesh.expert)]
            for name in group[0]:
                whole = merge(name, [part[name] for part in group], expert.cut_dim(name))
                assert np.array_equal(found.setdefault(name, whole), whole), name
    return found


def tensor_group(folder: Path, case: str, mesh: Mesh, pipe: int, data: int) -> Weights:
    """The weights of one stage and data coordinate, whole but for experts."""
    ranks = [mesh.rank(Coords(pipe, data, place)) for place in range(mesh.tensor)]
    parts = [dict(np.load(folder / f"{case}-{rank}.npz")) for rank in ranks]
    return {name: merge(name, [part[name] for part in parts], tensor.cut_dim(name)) for name in parts[0]}


def merge(name: str, slices: list[NDArray[np.float32]], dim: int | None) -> NDArray[np.float32]:
    """One parameter from the slices of a group of ranks; one that is not cut must be the same on all."""
    if dim is not None:
        return np.concatenate(slices, axis=dim)
    assert all(np.array_equal(slices[0], each) for each in slices), f"{name} differs between ranks"
    return slices[0]


def differences(run: Run, wanted: Run) -> Differences:
    """The largest differences of `run` from `wanted`."""
    assert run.weights.keys() == wanted.weights.keys()
    weights = max(float(np.abs(array - wanted.weights[name]).max()) for name, array in run.weights.items())
    return Differences(_relative(run.losses, wanted.losses), _relative(run.norms, wanted.norms), weights)


def strayed(found: Weights, wanted: Weights, start: Weights) -> float:
    """How far two runs that began at `start` ended apart, over how far the wanted one went (2-norms)."""
    apart = sum(float(np.square(array - found[name]).sum()) for name, array in wanted.items())
    went = sum(float(np.square(array - start[name]).sum()) for name, array in wanted.items())
    return math.sqrt(apart / went)


def too_far(
    runs: dict[str, Run],
    alone: dict[str, Run],
    tolerance: dict[str, float],
    reference: Callable[[str], str] = str,
) -> dict[str, tuple[float, ...]]:
    """The cases that are not within `tolerance` of `alone`, 1e-5 where it names none; both go by `reference(case)`.

    Cases that it names are bf16's; a case is told by its differences and how far it strayed.
    """
    found = {}
    for case, run in runs.items():
        name = reference(case)
        wanted, far = alone[name], differences(run, alone[name])
        share = strayed(run.weights, wanted.weights, wanted.start)
        bounds = *[tolerance.get(name, 1e-5)] * len(far), STRAYED["bf16" if name in tolerance else "fp32"]
        if not all(x <= bound for x, bound in zip((*far, share), bounds, strict=True)):
            found[case] = (*far, share)
    return found


def hold_resumed(resumed: dict[str, Run], unbroken: dict[str, Run], first: int) -> None:
    """Hold that runs resumed after `first` steps are the unbroken ones, to the last bit."""
    for case, run in resumed.items():
        rest = unbroken[case]
        assert run.first == first, case
        assert (run.losses, run.norms) == (rest.losses[first:], rest.norms[first:]), case
        assert run.experts == rest.experts[first:], case
        assert differences(run, rest).weights == 0, case


def same_experts(run: Run, wanted: Run, tolerance: float) -> None:
    """Hold that experts did the same in both, but for relative differences up to `tolerance`."""
    for ours, theirs in zip(run.experts, wanted.experts, strict=True):
        assert ours and theirs and ours.keys() == theirs.keys()
        for key, value in ours.items():
            np.testing.assert_allclose(value, theirs[key], rtol=tolerance, err_msg=key)


def same_expert_training(runs: dict[str, Run], wanted: dict[str, Run]) -> None:
    """Hold that experts did the same in every case; those of `capacity`, and no others, dropped many tokens."""
    for case, run in runs.items():
        same_experts(run, wanted[case], 2e-2 if case == "bf16" else 1e-5)
        assert all((each["dropped_share"] > 0.3) is (case == "capacity") for each in run.experts if each), case


def _relative(found: list[float], wanted: list[float]) -> float:
    pairs = zip(found[-len(wanted) :], wanted[-len(found) :], strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)
