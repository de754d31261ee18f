"""Where a pipeline is cut: as the run file's table says, or so that costs are balanced. Pure arithmetic.

`bounds` has one more entry than there are stages: stage s holds layers bounds[s] .. bounds[s + 1]. The first layer
(encoders) is always on stage 0 and the last (head) on the last stage; what is chosen is how many blocks go with them.
"""

from functools import cache

from shared.errors import ConfigError
from shared.sections import RunConfig
from shared.stages import table_bounds


def bounds_of(config: RunConfig, costs: list[int]) -> list[int]:
    """Bounds of the stages: those of `mesh.stages`, or the best for the costs of the layers.

    Raises:
        ConfigError: there are more stages than layers.
    """
    return table_bounds(config) if config.mesh.stages else cuts(costs, config.mesh.pipe)


def cuts(weights: list[int], stages: int) -> list[int]:
    """Bounds of contiguous stages whose heaviest is as light as can be; earlier stages are filled first on ties.

    Raises:
        ConfigError: there are more stages than layers.
    """
    if stages > len(weights):
        rule = f"must be at most the number of layers, {len(weights)} (encoders, decoder blocks, head)"
        raise ConfigError("mesh.pipe", stages, rule, "lower it or raise model.decoder.depth")
    sums = [sum(weights[:i]) for i in range(len(weights) + 1)]

    @cache
    def best(start: int, left: int) -> tuple[int, tuple[int, ...]]:
        if left == 1:
            return sums[-1] - sums[start], (len(weights),)
        found = []
        for stop in range(start + 1, len(weights) - left + 2):
            heaviest, rest = best(stop, left - 1)
            found.append((max(sums[stop] - sums[start], heaviest), -stop, rest))
        heaviest, stop, rest = min(found)
        return heaviest, (-stop, *rest)

    return [0, *best(0, stages)[1]]
