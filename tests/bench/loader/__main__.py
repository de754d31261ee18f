"""`python -m tests.bench.loader`."""

import typer

from tests.bench.loader.bench import main

typer.run(main)
