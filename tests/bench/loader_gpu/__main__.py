"""`python -m tests.bench.loader_gpu OUT.md`."""

import typer

from tests.bench.loader_gpu.bench import main

if __name__ == "__main__":
    typer.run(main)
