"""Bad samples: counted by reason, each named once, and a loud stop when there are too many.

Only the tally and the limits live here. A worker finds the sample and its substitute.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from dataloader_svc import metrics
from dataloader_svc.tasks import Verdict
from shared.errors import TooManyBadSamples
from shared.logs import RateLimited, logger
from shared.sections import QuarantineSection


class Quarantine:
    """Tally of one daemon life. `name` turns a sample id into `dataset/shard/key`."""

    def __init__(self, limits: QuarantineSection, name: Callable[[int], str]) -> None:
        self._limits, self._name = limits, name
        self._warn = RateLimited(logger("quarantine").warning)
        self._named: set[int] = set()
        self.reasons: Counter[str] = Counter()
        self.seen = self.bad = self.consecutive = 0

    def record_index(self, problems: Iterable[tuple[str, str]], left_out: int, samples: int) -> None:
        """Count (reason, text) of what the index found, `left_out` of `samples` for it.

        These never enter the plan, so no limit counts them; a share over `max_share` is told apart.
        """
        for reason, text in problems:
            self._count(reason)
            self._warn(reason, f"left out of the index: {text} ({reason})")
        if left_out > self._limits.max_share * samples:
            share = f"{left_out} of {samples} samples are left out, more than loader.quarantine.max_share would bear"
            self._warn("share", f"{share}; millstream-loader index tells why ({self._summary()})")

    def record(self, good: int, verdicts: Iterable[Verdict]) -> None:
        """Count one filled micro-batch: `good` samples in the slot and the `verdicts` met on the way.

        Raises:
            TooManyBadSamples: no good sample among the last `max_consecutive`, or a share over `max_share` of all
                samples tried, once `after_samples` were.
        """
        verdicts = list(verdicts)
        for verdict in verdicts:
            self._count(verdict.reason)
            self._tell(verdict)
        self.seen += good + len(verdicts)
        self.bad += len(verdicts)
        self.consecutive = 0 if good else self.consecutive + len(verdicts)
        self._hold_limits()

    def _count(self, reason: str) -> None:
        self.reasons[reason] += 1
        metrics.QUARANTINED.labels(reason).inc()

    def _tell(self, verdict: Verdict) -> None:
        if verdict.sample_id not in self._named:
            self._named.add(verdict.sample_id)
            where = self._name(verdict.sample_id)
            self._warn(verdict.reason, f"sample {where} is left out: {verdict.reason}, {verdict.detail}")

    def _hold_limits(self) -> None:
        limits = self._limits
        if self.consecutive >= limits.max_consecutive:
            rule = f"loader.quarantine.max_consecutive allows fewer than {limits.max_consecutive}"
            raise TooManyBadSamples(f"{self.consecutive} samples in a row are bad and {rule} ({self._summary()})")
        if self.seen >= limits.after_samples and self.bad > limits.max_share * self.seen:
            rule = f"loader.quarantine.max_share allows {limits.max_share:g}"
            raise TooManyBadSamples(f"{self.bad} of {self.seen} samples are bad and {rule} ({self._summary()})")

    def _summary(self) -> str:
        return ", ".join(f"{reason} {count}" for reason, count in self.reasons.most_common(5))
