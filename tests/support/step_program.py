"""A program for `run_ranks`: train steps on made-up global batches, case after case, and report every number.

Task: `config` (a run file), `cases` (name -> overrides), `plans` (`MIXED` or another of `packs`; with `apart` each of
their samples is a micro-batch of its own), `steps`, and for checkpoints
`checkpoints` (a folder; `{case}` in it is replaced), `save_every`, `resume`, `copies` (a folder to save in what was
just loaded), `ends` (one for the state after the last step). Data-parallel rank d of n takes micro-batches d, d + n
and so on. Report: case -> first step, losses, grad norms and what experts did; weights go to `<case>-<rank>.npz`, those
before the first step to `<case> start-<rank>.npz`.

Cases named in `omit` leave out the steps listed there; those in `poison` are spoiled as `spoiled` says, and report
which steps were skipped and which micro-batches were suspected as well.
"""

import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shared.batch import Cursor
from shared.config import load
from shared.sections import RunConfig
from tests.support import packs
from tests.support.poison import spoiled
from trainer.checkpoint import Checkpoints
from trainer.launch import Ranks, join
from trainer.manifest import layout_of, signature_of
from trainer.optim import lr_at

if TYPE_CHECKING:
    from trainer.engine import Engine


def main() -> None:
    """Run every case of the task in this rank."""
    warnings.filterwarnings("error", module=r"(trainer|shared)\b")
    task: dict[str, Any] = json.loads(os.environ["MILLSTREAM_TASK"])
    out = Path(os.environ["MILLSTREAM_OUT"])
    first, *_ = configs = {name: load(task["config"], overrides) for name, overrides in task["cases"].items()}
    ranks = join(configs[first])
    report = {name: run_case(config, ranks, out / name, task) for name, config in configs.items()}
    (out / f"rank-{ranks.rank}.json").write_text(json.dumps(report))
    ranks.leave()


def run_case(config: RunConfig, ranks: Ranks, out: Path, task: dict[str, Any]) -> dict[str, Any]:
    """First step, and losses and gradient norms from it on; weights after the last one are written."""
    from trainer.engine import build_engine

    engine = build_engine(config, ranks)
    folders = {key: Path(str(task.get(key, out)).format(case=out.name)) for key in ("checkpoints", "copies", "ends")}
    store = open_store(folders["checkpoints"], config, ranks)
    write_weights(engine, Path(f"{out} start-{ranks.rank}.npz"))
    saved = store.load_newest(engine) if task.get("resume") else None
    first = saved.step if saved else 0
    if "copies" in task:
        save_now(open_store(folders["copies"], config, ranks), engine, first)
    make_batch = packs.global_batch_apart if task.get("apart") else packs.global_batch
    poison: dict[str, Any] = task.get("poison", {}).get(out.name, {})
    losses, norms, experts, skipped, suspects = [], [], [], [], []
    for step in range(first, task["steps"]):
        if step in task.get("omit", {}).get(out.name, ()):
            continue
        batches = make_batch(config, getattr(packs, task["plans"]), seed=step)
        share = batches[ranks.coords.data :: ranks.mesh.data]
        with spoiled(engine, ranks, step, **poison):
            result = engine.train_batch(iter(share), lr_at(step, task["steps"], config.train.optim))
        if result.skipped:
            skipped.append(step)
            suspects += result.suspects
            continue
        losses.append(result.loss)
        norms.append(result.grad_norm)
        experts.append(msgspec.to_builtins(result.experts))
        store.poll()
        if task.get("save_every") and (step + 1) % task["save_every"] == 0:
            store.save(engine, step + 1, Cursor(0, step + 1, 0))
    store.finish()
    if "ends" in task:
        save_now(open_store(folders["ends"], config, ranks), engine, task["steps"])
    write_weights(engine, Path(f"{out}-{ranks.rank}.npz"))
    report = {"first": first, "losses": losses, "norms": norms, "experts": experts}
    return {**report, "skipped": skipped, "suspects": suspects} if poison else report


def write_weights(engine: "Engine", path: Path) -> None:
    """This rank's weights as they are, in fp32."""
    np.savez(path, **{name: p.detach().float().numpy() for name, p in engine.named_parameters()})


def open_store(folder: Path, config: RunConfig, ranks: Ranks) -> Checkpoints:
    """Checkpoints in a folder; all of them are kept."""
    return Checkpoints(folder, ranks, layout_of(config), signature_of(config), keep=100, how=config.train.checkpoint)


def save_now(store: Checkpoints, engine: "Engine", step: int) -> None:
    """Save and commit."""
    store.save(engine, step, Cursor(0, step, 0))
    store.finish()


if __name__ == "__main__":
    main()
