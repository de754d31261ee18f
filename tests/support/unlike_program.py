"""A program for `run_ranks`: one step of a run whose readers of one stream are, or are not, given the same batches.

Task: `config`, `sets`, `unlike`, and `short`: the last rank's loader ends before its last micro-batch. Step and
comparison are a training run's own (`Feed`, `Engine`, `take`). Report: how many micro-batches this rank took.
"""

import json
import os
from pathlib import Path
from typing import Any

from shared.batch import Cursor
from shared.config import load
from tests.support import packs
from trainer.batches import Counts
from trainer.feed import Feed, MicroBatch
from trainer.launch import join
from trainer.preprocess import DeviceBatch, Tensors


def device_batch(micro: int, batch: MicroBatch, seed: int) -> DeviceBatch:
    """A made-up micro-batch as the preprocessor hands it on; its checksum is that of other bytes for another seed."""
    (tokens, *rest), (labels, _) = batch
    place, after = Cursor(0, 0, micro), Cursor(0, 0, micro + 1)
    return DeviceBatch(
        Tensors(tokens, labels, *rest),
        place,
        after,
        batch_id=f"b{micro}",
        group=0,
        counts=Counts(1, 0, 0, tokens.shape[0], 1),
        step_labels=100,
        sample_ids=(micro,),
        substituted=0,
        checksum=seed,
        wait_s=0.0,
        preprocess_s=0.0,
    )


def main() -> None:
    """Run the step in this rank."""
    task: dict[str, Any] = json.loads(os.environ["MILLSTREAM_TASK"])
    config = load(task["config"], task["sets"])
    ranks = join(config)
    from trainer.engine import build_engine
    from trainer.train import Parts, take

    seed = ranks.reader if task["unlike"] else 0
    batches = packs.global_batch(config, packs.MIXED[:4], seed=seed)
    share = batches[ranks.coords.data :: ranks.mesh.data]
    if task.get("short") and ranks.rank == ranks.mesh.world - 1:
        del share[-1]
    feed = Feed((device_batch(i, batch, seed) for i, batch in enumerate(share)), len(batches), 0, 1)
    engine = build_engine(config, ranks)
    engine.train_batch(feed, lr=1e-3)
    taken = take(Parts(engine, None, None, feed, None, None, None), ranks)  # type: ignore[arg-type]
    (Path(os.environ["MILLSTREAM_OUT"]) / f"rank-{ranks.rank}.json").write_text(json.dumps(len(taken.lines)))
    ranks.leave()


if __name__ == "__main__":
    main()
