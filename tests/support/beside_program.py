"""One rank: joins a mesh, connects to its own daemon as the trainer does, and reports what it read.

Task: `config` (the run file), `endpoints` (one for each rank), `mesh`, `batches`.
"""

import itertools
import json
import os
from pathlib import Path

from shared.config import load
from trainer.launch import join
from trainer.train import Start, connect


def main() -> None:
    task, rank = json.loads(os.environ["MILLSTREAM_TASK"]), int(os.environ["RANK"])
    own = [f"loader.endpoint={task['endpoints'][rank]}", "train.device=cpu"]
    config = load(task["config"], [*own, *(f"mesh.{axis}={degree}" for axis, degree in task["mesh"].items())])
    ranks, seen = join(config), []
    if ranks.is_reader:
        with connect(config, ranks, Start()) as client:
            seen = [[b.batch_id, b.checksum] for b in itertools.islice(client, task["batches"])]
    ranks.barrier()
    Path(os.environ["MILLSTREAM_OUT"], f"rank-{rank}.json").write_text(json.dumps(seen))
    ranks.leave()


if __name__ == "__main__":
    main()
