"""A program for `run_ranks`: tell `Skips` what steps did, on every rank.

Task: `limit`, and `steps`, each a list with one entry for each rank: null for a good step, else a list with what was
skipped: [batch ids of the step, places of the suspects]. Report: the error that ended it, with its step, or null.
"""

import json
import math
import os
from pathlib import Path

from shared.config import load
from shared.errors import NumericsError
from shared.logs import setup_logging
from trainer.launch import join
from trainer.nonfinite import Skips, StepResult


def main() -> None:
    """Tell one step after another in this rank."""
    task = json.loads(os.environ["MILLSTREAM_TASK"])
    setup_logging("trainer")
    ranks = join(load(task["config"], [f"mesh.data={os.environ['WORLD_SIZE']}"]))
    skips, ended = Skips(ranks, task["limit"]), None
    for step, every in enumerate(task["steps"]):
        mine = every[ranks.rank]
        ids, suspects = mine or [[], []]
        result = StepResult(1.0, math.inf, True, tuple(suspects)) if mine else StepResult(1.0, 2.0)
        try:
            skips.note(step, result, ids, sum(each is not None for each in every))
        except NumericsError as error:
            ended = [step, str(error)]
            break
    (Path(os.environ["MILLSTREAM_OUT"]) / f"rank-{ranks.rank}.json").write_text(json.dumps(ended))
    ranks.leave()


if __name__ == "__main__":
    main()
