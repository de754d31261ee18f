"""A program for `run_ranks`: join, build the engine, and report how long collectives of every group of ranks may take.

Task: `config`, `sets`. Report: seconds, of every process group that this rank is in, DeepSpeed's own among them.
"""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from shared.config import load
from trainer.launch import join


def main() -> None:
    """Report, in this rank."""
    task = json.loads(os.environ["MILLSTREAM_TASK"])
    config = load(task["config"], task["sets"])
    ranks = join(config)
    from trainer.engine import build_engine

    build_engine(config, ranks)
    groups = dist.distributed_c10d._world.pg_map
    found = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    (Path(os.environ["MILLSTREAM_OUT"]) / f"rank-{ranks.rank}.json").write_text(json.dumps(found))
    ranks.leave()


if __name__ == "__main__":
    main()
