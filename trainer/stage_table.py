"""The pipeline's stages as a person sees them at the start: a table, and the lines of a run file that ask for it."""

import sys
from collections.abc import Sequence
from itertools import pairwise

import msgspec
from rich.console import Console
from rich.table import Table

from shared.sections import RunConfig
from shared.stages import layer_names, stage_layers


class Stage(msgspec.Struct, frozen=True):
    """One stage: its layers, their parameters before tensor and expert parallelism cut them, and its share of cost."""

    layers: str
    parameters: int
    share: float


def stages(config: RunConfig, bounds: Sequence[int], parameters: Sequence[int], costs: Sequence[int]) -> list[Stage]:
    """A row for each stage; `parameters` and `costs` are those of every layer."""
    names = stage_layers(layer_names(config.model.decoder.depth), bounds)
    parts = [slice(start, stop) for start, stop in pairwise(bounds)]
    total = sum(costs)
    return [
        Stage(name, sum(parameters[part]), sum(costs[part]) / total) for name, part in zip(names, parts, strict=True)
    ]


def run_file_lines(rows: Sequence[Stage]) -> str:
    """The `stages` of a run file's mesh section, which repeat these cuts."""
    return "\n".join(["stages:", *(f"  - {{layers: {row.layers}}}" for row in rows)])


def show_stages(rows: Sequence[Stage], cost: str) -> None:
    """Print the table and its lines on standard error, where progress is; `cost` names what the share is of."""
    table = Table("stage", "layers", "parameters", f"share of {cost}", title="pipeline")
    for number, row in enumerate(rows):
        table.add_row(str(number), row.layers, f"{row.parameters:,}", f"{row.share:.1%}")
    console = Console(file=sys.stderr)
    console.print(table)
    console.print(f"to cut like this again, write under mesh:\n{run_file_lines(rows)}", highlight=False, soft_wrap=True)
