"""The plans of a job's epochs: made when asked for, or read where they were kept, and made ahead of their time.

An epoch's plan is a pure function of (data section, index, epoch), so what `PlanFiles` kept is what would be made.
"""

import threading
from collections import OrderedDict
from concurrent.futures import Future
from functools import cached_property

import numpy as np

from dataloader_svc import mixture
from dataloader_svc.bucket import Array, Facts, assign, present
from dataloader_svc.epoch import EpochPlan, build_epoch, per_dataset
from dataloader_svc.plan_file import PlanFiles
from dataloader_svc.summary import PlanSummary, summarize
from shared.errors import ConfigError
from shared.sections import DataSection

EPOCHS_KEPT = 2


class Epochs:
    """The last two epochs asked for. Safe to share between threads: each plan is made once, and only who asks for it
    waits."""

    def __init__(self, data: DataSection, facts: Facts, files: PlanFiles | None) -> None:
        self._data, self._index, self._files = data, facts, files
        self._plans: OrderedDict[int, Future[EpochPlan]] = OrderedDict()
        self._lock = threading.Lock()

    def plan(self, epoch: int) -> EpochPlan:
        """One epoch's.

        Raises:
            ConfigError: fewer good samples than one global batch can be made of.
        """
        future, mine = self._claim(epoch)
        if mine:
            self._fulfil(future, epoch)
        return future.result()

    def steps(self, epoch: int, per_step: int) -> int:
        """How many steps of `per_step` rounds the epoch has. Where it was planned before, that was kept.

        Raises:
            ConfigError: see `plan`.
        """
        rounds = self._files.rounds(epoch) if self._files else None
        return (len(self.plan(epoch).bounds) if rounds is None else rounds) // per_step

    def ahead(self, epoch: int) -> None:
        """Have the plan made in a thread of its own, if there is none. What is wrong with it, `plan` raises."""
        future, mine = self._claim(epoch)
        if mine:
            threading.Thread(target=self._fulfil, args=(future, epoch), name="plan").start()

    def summary(self, epoch: int) -> PlanSummary:
        """One epoch in numbers."""
        found = self._files.summary(epoch) if self._files else None
        if found is None:
            found = summarize(self._data, self._index.facts, self._group_of, self.plan(epoch), epoch)
            if self._files:
                self._files.keep_summary(found)
        return found

    def times(self, epoch: int) -> Array:
        """How often each sample stands in the epoch. int64 [I]."""
        return np.bincount(self.plan(epoch).chosen(), minlength=len(self._group_of))

    def groups(self) -> tuple[int, ...]:
        """Groups that packs of any epoch may be of, ascending. A summary that was kept tells without the columns."""
        told = self._files.summary(0) if self._files else None
        return told.groups if told else present(self._group_of)

    @cached_property
    def _group_of(self) -> Array:
        return assign(self._index.facts, self._data)

    def _claim(self, epoch: int) -> tuple["Future[EpochPlan]", bool]:
        """The epoch's place, and whether it is the caller's to fill."""
        with self._lock:
            mine = epoch not in self._plans
            if mine:
                self._plans[epoch] = Future()
                if len(self._plans) > EPOCHS_KEPT:
                    self._plans.popitem(last=False)
            self._plans.move_to_end(epoch)
            return self._plans[epoch], mine

    def _fulfil(self, future: "Future[EpochPlan]", epoch: int) -> None:
        try:
            future.set_result(self._found(epoch))
        except BaseException as error:
            with self._lock:
                self._plans.pop(epoch, None)
            future.set_exception(error)

    def _found(self, epoch: int) -> EpochPlan:
        plan = self._files.plan(epoch) if self._files else None
        if plan is None:
            plan = self._made(epoch)
            if self._files:
                self._files.keep_plan(epoch, plan)
                plan = self._files.plan(epoch) or plan
        return plan

    def _made(self, epoch: int) -> EpochPlan:
        batch, good = self._data.batch, self._entries()
        least, remedy = batch.micro_batches, "lower it, or add data"
        if good < least:
            rule = f"must not exceed the good samples, {good}: one global batch needs a sample a micro-batch"
            raise ConfigError("data.batch.micro_batches", least, rule, remedy)
        plan = build_epoch(self._data, self._index.facts, self._group_of, epoch)
        if not len(plan.bounds):
            rule = f"makes no whole global batch of {good} good samples: no {least} micro-batches in whole rounds"
            raise ConfigError("data.batch.micro_batches", least, rule, "lower it, or set data.batch.leftovers: pad")
        return plan

    def _entries(self) -> int:
        """How many samples an epoch holds, counted as often as they come."""
        good = np.flatnonzero(self._group_of >= 0)
        if not mixture.weighted(self._data.datasets):
            return len(good)
        counts = [len(part) for part in per_dataset(self._index.facts, good)]
        return sum(quota.entries for quota in mixture.quotas(self._data.datasets, counts))
