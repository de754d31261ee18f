"""A pipeline's stage table: names of layers, and what a table must hold to. Pure arithmetic over a run file.

Layers are `encode` (encoders, projectors, token embedding), `decoder.0` and so on, `head`. A stage holds neighbouring
ones and writes them as one name or a range, first and last included.

>>> layer_names(4)
['encode', 'decoder.0', 'decoder.1', 'decoder.2', 'decoder.3', 'head']
>>> stage_layers(layer_names(4), [0, 2, 6])
['encode..decoder.0', 'decoder.1..head']
"""

from collections.abc import Sequence
from itertools import pairwise

from shared.errors import ConfigError, require
from shared.sections import RunConfig, StageSection

TO = ".."


def layer_names(depth: int) -> list[str]:
    """The layers of a model whose decoder has `depth` blocks, in order."""
    return ["encode", *(f"decoder.{block}" for block in range(depth)), "head"]


def stage_layers(names: Sequence[str], bounds: Sequence[int]) -> list[str]:
    """What each stage holds, as a table's `layers`; stage s has places bounds[s] .. bounds[s + 1]."""
    ends = [(names[start], names[stop - 1]) for start, stop in pairwise(bounds)]
    return [first if first == last else f"{first}{TO}{last}" for first, last in ends]


def table_bounds(config: RunConfig) -> list[int]:
    """The bounds that `mesh.stages` asks for.

    Raises:
        ConfigError: a name is unknown, or the stages do not follow on one another from encode to head.
    """
    names = layer_names(config.model.decoder.depth)
    bounds = [0]
    for number, stage in enumerate(config.mesh.stages):
        start, stop = _range(f"mesh.stages[{number}].layers", stage.layers, names)
        wanted = names[bounds[-1]] if bounds[-1] < len(names) else "nothing: head is already on an earlier stage"
        rule = f"must begin with {wanted}, so that each layer is on one stage and all are in order"
        require(start == bounds[-1], f"mesh.stages[{number}].layers", stage.layers, rule, "move the cut")
        bounds.append(stop)
    rule = "must end with head on the last stage"
    require(bounds[-1] == len(names), "mesh.stages", f"ends with {names[bounds[-1] - 1]}", rule, "add the rest to it")
    return bounds


def check_stages(config: RunConfig) -> None:
    """Hold a stage table to the run file's mesh and model, and to what a pipeline of DeepSpeed's can run.

    Raises:
        ConfigError: the first rule broken.
    """
    mesh = config.mesh
    if not mesh.stages:
        return
    rule = f"must be the number of stages in mesh.stages, {len(mesh.stages)}"
    require(mesh.pipe == len(mesh.stages), "mesh.pipe", mesh.pipe, rule, f"set {len(mesh.stages)}, or change the table")
    rule = "measures where to cut, which mesh.stages says already"
    require(mesh.balance == "parameters", "mesh.balance", mesh.balance, rule, "remove one of both")
    bounds = table_bounds(config)
    for number, stage in enumerate(mesh.stages):
        _check_columns(config, f"mesh.stages[{number}]", stage, range(bounds[number], bounds[number + 1]))


def _check_columns(config: RunConfig, name: str, stage: StageSection, places: range) -> None:
    tokens, tensor, decoder = config.data.batch.tokens, config.mesh.tensor, config.model.decoder
    value = stage.micro_batch_tokens
    rule = f"must be data.batch.tokens, {tokens}, on every stage: a pipeline hands micro-batches on as they are, it "
    rule += "neither joins nor splits them"
    remedy = "leave it out, or set data.batch.tokens"
    require(value in (0, tokens), f"{name}.micro_batch_tokens", value, rule, remedy)
    rule = f"must be mesh.tensor, {tensor}, on every stage: DeepSpeed's grid of ranks has as many on each"
    remedy = "leave it out, or set mesh.tensor; encoders stay whole on every rank anyway"
    require(stage.tensor in (0, tensor), f"{name}.tensor", stage.tensor, rule, remedy)
    mixed = any(block + 1 in places for block in decoder.expert_blocks)
    active = decoder.experts_per_token if mixed else 1
    rule = f"must be {active}: its layers have {'experts' if mixed else 'no experts, one network each'}, and "
    rule += "model.decoder.experts_per_token is one number for all blocks that have"
    remedy = "leave it out, or change model.decoder.experts_per_token or expert_every"
    require(stage.active_experts in (0, active), f"{name}.active_experts", stage.active_experts, rule, remedy)


def _range(name: str, text: str, names: list[str]) -> tuple[int, int]:
    first, _, last = text.partition(TO)
    places = []
    for each in (first, last or first):
        if each not in names:
            rule = f"names a layer that is not there; there are encode, decoder.0 to {names[-2]}, head"
            raise ConfigError(name, text, rule, f"for example encode{TO}{names[-2]}")
        places.append(names.index(each))
    require(places[0] <= places[1], name, text, "ends before it begins", f"write {last}{TO}{first}")
    return places[0], places[1] + 1
