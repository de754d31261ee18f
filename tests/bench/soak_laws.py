"""What must hold after a soak: order, exactly once, bits, and that nothing grew. Each law is a function that raises
Broken, and returns what it found in words otherwise.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from dataloader_svc.plan import Planner
from dataloader_svc.verify import check, read_logs
from shared.batch import Cursor
from shared.config import endpoint
from shared.sections import RunConfig
from tests.support.daemons import serving
from tests.support.ordering import Broken, hold, name, walk
from tests.support.reading import Line, Place, ends_step, line_of, lines
from tests.support.watch import FEWEST, Footprint, growth
from trainer.client import LoaderClient

WINDOW = 8
"""Batches in a row that the undisturbed reference reads at each place."""
MIB = 1 << 20
GROWTH_SHARE, GROWTH_BYTES, GROWTH_COUNT = 0.02, 2 * MIB, 2
WAIT_S = 60.0


class Sample(msgspec.Struct, frozen=True):
    """All processes at one moment: (role, process id) -> what it holds; files in the shared-memory folder."""

    step: int
    seconds: float
    processes: dict[tuple[str, int], Footprint]
    files: int

    def of(self, role: str = "") -> Footprint:
        """All of a role summed up, or all."""
        return sum((f for (own, _), f in self.processes.items() if role in ("", own)), Footprint())


def in_order(planner: Planner, log: Path, place: Place, steps: int) -> str:
    """A reader consumed the plan's batches, each once, from the first step to the last and nothing beyond."""
    came = lines(log)
    for line, (pack, after) in zip(came, walk(planner, rank=place.rank, ranks=place.ranks), strict=False):
        planned = (pack.cursor, after, pack.batch_id, pack.sample_ids, 0)
        found = (line.cursor, line.after, line.batch_id, line.sample_ids, line.substituted)
        hold(found == planned, f"{place.name}: {planned} is next, {found} came")
    whole = sum(map(ends_step, came))
    hold(whole == steps and ends_step(came[-1]), f"{place.name}: {whole} of {steps} steps came")
    return f"{len(came)} batches of {place.name} in the planned order"


def same_bits(logs: dict[Place, Path]) -> str:
    """All readers of a data rank were given the same bytes at every place that they have in common."""
    sums: dict[tuple[int, Cursor], int] = {}
    for place, log in logs.items():
        for line in lines(log):
            same = sums.setdefault((place.rank, line.cursor), line.checksum) == line.checksum
            hold(same, f"{place.name} and another of its rank were given different bytes at {name(line.cursor)}")
    return f"{len(sums)} batches, the same bytes for all readers of a rank"


def exactly_once(planner: Planner, config: RunConfig, logs: Sequence[Path], steps: int) -> str:
    """`millstream-loader verify` finds nothing lost, repeated or unplanned, and nothing replaced."""
    verdict = check(planner, config.data, read_logs(logs))
    hold(verdict.clean and verdict.steps == steps, f"verify: {verdict}")
    hold(not (verdict.left_out or verdict.substituted), f"verify: {verdict}")
    return f"verify: {verdict.steps} steps, {verdict.samples} samples, {verdict.lost} lost, {verdict.repeated} repeated"


def as_undisturbed(path: Path, config: RunConfig, logs: dict[Place, Path], windows: int, seed: int) -> str:
    """A fresh daemon that nobody disturbs serves the same bytes at `windows` places drawn from the run."""
    rng, compared = random.Random(seed), 0
    by_rank = {place.rank: (place, lines(log)) for place, log in logs.items()}
    with serving(path):
        for _ in range(windows):
            place, came = by_rank[rng.choice(sorted(by_rank))]
            first = rng.randrange(max(1, len(came) - WINDOW))
            want = came[first : first + WINDOW]
            hold(list(reference(config, place, want)) == want, f"other bytes from {name(want[0].cursor)} on")
            compared += len(want)
    return f"{compared} batches at {windows} places as an undisturbed daemon serves them, bit for bit"


def reference(config: RunConfig, place: Place, want: Sequence[Line]) -> Iterator[Line]:
    """What the daemon serves at the places of `want`, as its lines."""
    client = LoaderClient(
        endpoint(config),
        data=config.data,
        data_rank=place.rank,
        data_ranks=place.ranks,
        cursor=want[0].cursor,
        wait_s=WAIT_S,
        verify=True,
    )
    with client:
        for batch in islice(client, len(want)):
            yield line_of(batch, place.rank, place.ranks)


def flat(samples: Sequence[Sample]) -> str:
    """Neither the whole nor any long-lived process grew: medians of the last third against the middle third's."""
    hold(len(samples) >= FEWEST, f"{len(samples)} samples are too few to tell; {FEWEST} are needed")
    lives: dict[tuple[str, int], list[Footprint]] = defaultdict(list)
    for sample in samples:
        for who, held in sample.processes.items():
            lives[who].append(held)
    _steady("all processes", "memory", [s.of().pss_bytes for s in samples])
    long = {who: life for who, life in lives.items() if len(life) >= FEWEST}
    for (role, pid), life in long.items():
        _steady(f"{role}, process {pid}", "heap memory", [held.heap_bytes for held in life])
        for what in ("fds", "threads", "segments"):
            _steady(f"{role}, process {pid}", what, [getattr(held, what) for held in life])
    return f"nothing grew in {len(samples)} samples, over all processes and in each of {len(long)} that lived long"


def _steady(who: str, what: str, values: Sequence[int]) -> None:
    allowed = max(GROWTH_BYTES, GROWTH_SHARE * max(values)) if "memory" in what else GROWTH_COUNT
    grown = growth(values)
    hold(grown <= allowed, f"{what} of {who} grew by {grown:.0f}, {allowed:.0f} allowed: {list(values)}")


def nothing_left(folder: Path, shm: Path) -> str:
    """Once the daemon has ended, no segment, socket or lock lies anywhere."""
    left = [str(p) for p in (*shm.iterdir(), *folder.iterdir()) if p.is_socket() or "millstream-" in p.name]
    hold(not left, f"left behind: {left}")
    return "no segment and no socket left behind"


def no_traceback(outputs: Iterable[str]) -> str:
    """Nobody died of an exception, nor was anything convicted of deaths that we dealt."""
    said = list(outputs)
    for text in said:
        for word in ("Traceback", "kills decode workers", "lease lost"):
            at = text.find(word)
            hold(at < 0, f"{word!r} in a log: ...{text[max(0, at - 500) : at + 2000]}")
    return f"no traceback in {len(said)} logs"


def verdicts(laws: dict[str, Callable[[], str]]) -> Iterator[tuple[str, bool, str]]:
    """Each law's name, whether it holds, and what it found."""
    for law, examine in laws.items():
        try:
            yield law, True, examine()
        except Broken as broken:
            yield law, False, str(broken)
