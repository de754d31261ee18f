"""A run of consecutive steps, balanced when somebody reads them: no step looks beyond itself for that.

Shapes: E entries (samples of these steps, step by step), R rounds, W packs of a round (its columns).
"""

from collections.abc import Sequence

import numpy as np

from dataloader_svc import balance
from dataloader_svc.balance import Imbalance, ratios, sample_costs, sums
from dataloader_svc.bucket import Array
from dataloader_svc.epoch import EpochPlan
from shared.batch import Group
from shared.sections import DataSection


class Block:
    """Balanced packs. Pack c of round r holds ids[bounds[r, c] : bounds[r, c + 1]], maybe none.

    `labels`, `costs` and `packed_costs` [R, W] are each pack's label tokens, its cost, and its cost before balancing.
    """

    def __init__(self, ids: Array, bounds: Array, labels: Array, costs: Array, packed_costs: Array) -> None:
        self.ids, self.bounds, self.labels = ids, bounds, labels
        self.costs, self.packed_costs = costs, packed_costs
        self._imbalances: dict[int, list[Imbalance]] = {}

    @property
    def sizes(self) -> Array:
        """How many samples each pack holds. int64 [R, W]."""
        sizes: Array = np.diff(self.bounds, axis=1)
        return sizes

    def samples(self, round_: int, column: int) -> tuple[int, ...]:
        """Sample ids of a pack."""
        return tuple(self.ids[self.bounds[round_, column] : self.bounds[round_, column + 1]].tolist())

    def imbalances(self, per_step: int, data_ranks: int) -> list[Imbalance]:
        """Each step's, over `data_ranks` ranks."""
        if data_ranks not in self._imbalances:
            both = [ratios(costs, per_step, data_ranks).tolist() for costs in (self.packed_costs, self.costs)]
            self._imbalances[data_ranks] = [Imbalance(*each) for each in zip(*both, strict=True)]
        return self._imbalances[data_ranks]


def build_block(plan: EpochPlan, rounds: slice, table: Sequence[Group], data: DataSection) -> Block:
    """The given rounds of `plan`, which are whole steps. `table` are the groups of `data`."""
    whole, group = plan.bounds[rounds], plan.round_group[rounds]
    firsts, counts = whole[:, 0], whole[:, -1] - whole[:, 0]
    before = np.cumsum(counts) - counts
    at = np.repeat(firsts - before, counts) + np.arange(int(counts.sum()))
    bounds = whole - (firsts - before)[:, None]
    tokens = plan.tokens[at].astype(np.int64)
    costs = sample_costs(table, np.repeat(group, counts), tokens, data)
    most, batch = np.array([g.samples for g in table])[group], data.batch
    order, leveled = balance.balanced(bounds, costs, tokens, most, batch.tokens, batch.micro_batches // batch.round)
    labels = sums(plan.labels[at[order]], leveled)
    return Block(plan.ids[at[order]], leveled, labels, sums(costs[order], leveled), sums(costs, bounds))
