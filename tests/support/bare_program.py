"""`step_program` as it would run if `trainer/parallel/` had been deleted."""

import sys

from tests.support.step_program import main

if __name__ == "__main__":
    sys.modules["trainer.parallel"] = None  # type: ignore[assignment]
    main()
