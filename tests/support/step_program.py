"""A program for `run_ranks`: train steps on made-up global batches, case after case, and report every number.

Task: `config` (a run file), `cases` (name -> overrides), `plans` (`MIXED` or `LOPSIDED`), `steps`, and for checkpoints
`checkpoints` (a folder), `save_every`, `resume`. Data-parallel rank d of n takes micro-batches d, d + n, ... Report:
case -> first step, losses, grad norms and what experts did; weights go to `<case>-<rank>.npz`.
"""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shared.batch import Cursor
from shared.config import load
from shared.sections import RunConfig
from tests.support import packs
from trainer.checkpoint import Checkpoints
from trainer.launch import Ranks, join
from trainer.manifest import signature_of
from trainer.optim import lr_at


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
    store = Checkpoints(Path(task.get("checkpoints", out)), ranks, signature_of(config), keep=100)
    saved = store.load_newest(engine) if task.get("resume") else None
    first = saved.step if saved else 0
    losses, norms, experts = [], [], []
    for step in range(first, task["steps"]):
        batches = packs.global_batch(config, getattr(packs, task["plans"]), seed=step)
        share = batches[ranks.coords.data :: ranks.mesh.data]
        result = engine.train_batch(iter(share), lr_at(step, task["steps"], config.train.optim))
        losses.append(result.loss)
        norms.append(result.grad_norm)
        experts.append(msgspec.to_builtins(result.experts))
        if task.get("save_every") and (step + 1) % task["save_every"] == 0:
            store.save(engine, step + 1, Cursor(0, step + 1, 0))
    weights = {name: p.detach().float().numpy() for name, p in engine.named_parameters()}
    np.savez(f"{out}-{ranks.rank}.npz", **weights)
    return {"first": first, "losses": losses, "norms": norms, "experts": experts}


if __name__ == "__main__":
    main()
