"""Proof of exactly-once: what trainers logged as consumed, against the plan computed anew.

A log has one JSON object a line (`shared.consumed`) for each micro-batch that a step was made of. Several readers of
one data rank log the same micro-batch; one of them is enough, and further equal lines of *other files* are theirs. A
micro-batch twice in one file is a repetition. The number of data ranks may change from line to line.

Steps count as passed over, and not as lost, where a line says that they were, the run file's `data.skip_steps` asks for
it, and no rank consumed any part of them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from dataloader_svc.plan import Pack, Planner
from shared.batch import Cursor
from shared.consumed import Consumed
from shared.errors import DataError, MillstreamError
from shared.sections import DataSection

Place = tuple[int, int, int]
Step = tuple[int, int]


class Verdict(msgspec.Struct, frozen=True):
    """What the logs show. `lost`, `repeated` and `unknown` count planned samples (`*_batches`: micro-batches).

    `left_out` are planned samples that were bad, `substituted` the spares that stood in for them. `skipped_steps` were
    passed over on request, with `skipped` samples; `unasked_steps` are said to have been, but data.skip_steps does not
    hold them, so they count as lost.
    """

    steps: int
    batches: int
    samples: int
    lost_batches: int
    repeated_batches: int
    unknown_batches: int
    lost: int
    repeated: int
    left_out: int
    substituted: int
    skipped_steps: int = 0
    skipped: int = 0
    unasked_steps: int = 0

    @property
    def clean(self) -> bool:
        """Nothing lost, nothing repeated, nothing that the plan does not know."""
        wrong = (self.lost_batches, self.repeated_batches, self.unknown_batches, self.lost, self.repeated)
        return self.batches > 0 and not any(wrong)


def read_logs(paths: Sequence[Path]) -> list[list[Consumed]]:
    """The lines of each log; a folder stands for every consumed log in it.

    Raises:
        DataError: a file cannot be read, or a line is not what it should be; a folder has no log.
    """
    return [list(_lines(file)) for path in paths for file in _files(path)]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if found := sorted(path.glob("consumed-*.jsonl")):
        return found
    raise DataError(f"{path} holds no consumed-*.jsonl; give a run's folder, or its logs")


def _lines(path: Path) -> Iterator[Consumed]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"log {path} cannot be read ({error.strerror})") from None
    for number, line in enumerate(lines, 1):
        try:
            yield msgspec.json.decode(line, type=Consumed)
        except msgspec.MsgspecError as error:
            raise DataError(f"log {path}, line {number}: {error}") from None


def check(planner: Planner, data: DataSection, logs: Sequence[Sequence[Consumed]]) -> Verdict:
    """Hold the logs against the plan: from the first step logged to the last, every micro-batch once.

    Raises:
        ConfigError: data.skip_steps names steps that no run will reach.
    """
    repeated = sum(count - 1 for log in logs for count in Counter(map(_coordinates, log)).values())
    lines = {_coordinates(line): line for log in logs for line in log}
    packs: dict[Place, tuple[Pack, Consumed]] = {}
    unknown = 0
    for line in lines.values():
        pack = _planned(planner, line)
        if pack is None or not _fits(line, pack):
            unknown += 1
        else:
            repeated += (place := _global(line, data)) in packs
            packs[place] = (pack, line)
    return _verdict(planner, data, packs, repeated, unknown)


def _verdict(
    planner: Planner, data: DataSection, packs: dict[Place, tuple[Pack, Consumed]], repeated: int, unknown: int
) -> Verdict:
    passed, unasked = _passed_over(planner, packs)
    steps = [step for step in _steps(planner, packs) if step not in passed]
    width = data.batch.micro_batches
    places = [(epoch, step, place) for epoch, step in steps for place in range(width)]
    missing = [place for place in places if place not in packs]
    lost = sum(len(_at(planner, place).sample_ids) for place in missing)
    again = sum(_too_often(planner, packs, epoch) for epoch in {e for e, _ in steps})
    left_out = sum((Counter(pack.sample_ids) - Counter(line.sample_ids)).total() for pack, line in packs.values())
    samples = sum(len(line.sample_ids) for _, line in packs.values())
    substituted = sum(line.substituted for _, line in packs.values())
    counts = (len(missing), repeated, unknown, lost, again, left_out, substituted)
    skipped = sum(len(_at(planner, (*step, place)).sample_ids) for step in passed for place in range(width))
    return Verdict(len(steps), len(packs), samples, *counts, len(passed), skipped, unasked)


def _passed_over(planner: Planner, packs: dict[Place, tuple[Pack, Consumed]]) -> tuple[set[Step], int]:
    """Steps passed over as asked, and how many more are said to have been."""
    stretches = {(line.skipped_from, line.cursor) for _, line in packs.values() if line.skipped_from}
    told = {step for first, end in stretches for step in _between(planner, first, end)}
    told -= {(epoch, step) for epoch, step, _ in packs}
    asked = {step for step in told if any(first <= Cursor(*step) < end for first, end in planner.skips.spans())}
    return asked, len(told - asked)


def _coordinates(line: Consumed) -> tuple[int, ...]:
    return line.epoch, line.step, line.micro, line.data_rank, line.data_ranks


def _planned(planner: Planner, line: Consumed) -> Pack | None:
    try:
        return planner.pack(Cursor(line.epoch, line.step, line.micro), line.data_rank, line.data_ranks)
    except MillstreamError:
        return None


def _fits(line: Consumed, pack: Pack) -> bool:
    """Whether a log line can be of this pack: planned samples, and as many of its spares as it says."""
    strangers = Counter(line.sample_ids) - Counter(pack.sample_ids)
    return (
        pack.batch_id == line.batch_id and strangers <= Counter(pack.spares) and strangers.total() == line.substituted
    )


def _global(line: Consumed, data: DataSection) -> Place:
    """Where the micro-batch stands in its step, whatever the number of ranks (plan.py's formula)."""
    block, k = divmod(line.micro, data.batch.round // line.data_ranks)
    return line.epoch, line.step, block * data.batch.round + k * line.data_ranks + line.data_rank


def _at(planner: Planner, place: Place) -> Pack:
    epoch, step, micro = place
    return planner.pack(Cursor(epoch, step, micro), 0, 1)


def _steps(planner: Planner, places: Iterable[Place]) -> Iterator[Step]:
    """Every (epoch, step) from the first one logged to the last."""
    if logged := {Cursor(epoch, step) for epoch, step, _ in places}:
        last = max(logged)
        yield from _between(planner, min(logged), Cursor(last.epoch, last.step + 1))


def _between(planner: Planner, first: Cursor, end: Cursor) -> Iterator[Step]:
    """Every (epoch, step) from the step of `first` on, up to that of `end`."""
    epoch, step = first.epoch, first.step
    while (epoch, step) < (end.epoch, end.step):
        yield epoch, step
        epoch, step = (epoch, step + 1) if step + 1 < planner.steps(epoch) else (epoch + 1, 0)


def _too_often(planner: Planner, packs: dict[Place, tuple[Pack, Consumed]], epoch: int) -> int:
    """How many samples were consumed in places of their own beyond the times the plan has them in `epoch`.

    Stand-ins are no repetition, and neither are the repeats that a mixture plans.
    """
    own = (
        Counter(pack.sample_ids) & Counter(line.sample_ids)
        for (number, _, _), (pack, line) in packs.items()
        if number == epoch
    )
    times = planner.times(epoch)
    seen = Counter(sample_id for ids in own for sample_id in ids.elements())
    return sum(max(0, count - int(times[sample_id])) for sample_id, count in seen.items())
