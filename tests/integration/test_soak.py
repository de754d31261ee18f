"""A short soak, and that each of its laws sees what it is there to see."""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.progress import Progress

from shared.config import load
from shared.sections import RunConfig
from tests.bench import soak_laws as laws
from tests.bench.soak import PLACES, accidents, soak
from tests.bench.soak_report import Outcome, report
from tests.support.ordering import Broken, planner_of
from tests.support.reading import Line, Place, lines
from tests.support.watch import FEWEST, Footprint

STEPS, SEED = 200, 5
MIB = 1 << 20


class Soaked:
    """A soak that is over, and what its readers logged."""

    def __init__(self, folder: Path) -> None:
        (shm := folder / "shm").mkdir()
        self.outcome: Outcome = soak(folder / "run", shm, STEPS, 3, 200, SEED, Progress(disable=True))
        self.path = folder / "run" / "run.yaml"
        self.config: RunConfig = load(self.path)
        self.logs = {place: place.log(folder / "run" / "logs") for place in PLACES}

    def changed(self, folder: Path, change: Callable[[list[Line]], list[Line]], *places: Place) -> dict[Place, Path]:
        """Copies of the logs, with a change to those of `places`."""
        copies = {place: place.log(folder) for place in PLACES}
        for place, log in self.logs.items():
            came = change(lines(log)) if place in places else lines(log)
            copies[place].write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in came))
        return copies


@pytest.fixture(scope="module")
def soaked(tmp_path_factory: pytest.TempPathFactory) -> Soaked:
    return Soaked(tmp_path_factory.mktemp("soak"))


def without(came: list[Line]) -> list[Line]:
    return came[:50] + came[51:]


def twice(came: list[Line]) -> list[Line]:
    return came[:51] + came[50:]


def other_bytes(came: list[Line]) -> list[Line]:
    return [msgspec.structs.replace(line, checksum=line.checksum ^ 1) for line in came]


@pytest.mark.slow
def test_a_short_soak_holds(soaked: Soaked) -> None:
    """It is too short to tell whether anything grows."""
    assert [found for found in soaked.outcome.verdicts if not found[1] and found[0] != "flat"] == []
    assert sum(soaked.outcome.kills.values()) >= 3
    assert any(line.startswith("| exactly once | yes | verify: 200 steps") for line in report(soaked.outcome, "soak"))


@pytest.mark.slow
@pytest.mark.parametrize("change", [without, twice])
def test_a_batch_lost_or_repeated_is_seen(soaked: Soaked, tmp_path: Path, change: Callable[..., list[Line]]) -> None:
    rank = [place for place in PLACES if place.rank == 1]
    logs, planner = soaked.changed(tmp_path, change, *rank), planner_of(soaked.config)
    with pytest.raises(Broken, match=r"reader 1\.0: .* is next"):
        laws.in_order(planner, logs[rank[0]], rank[0], STEPS)
    with pytest.raises(Broken, match=r"lost_batches=1|repeated_batches=2"):
        laws.exactly_once(planner, soaked.config, list(logs.values()), STEPS)


@pytest.mark.slow
def test_an_early_end_is_seen(soaked: Soaked, tmp_path: Path) -> None:
    logs = soaked.changed(tmp_path, lambda came: came[:-1], PLACES[0])
    with pytest.raises(Broken, match=f"reader 0.0: {STEPS - 1} of {STEPS} steps came"):
        laws.in_order(planner_of(soaked.config), logs[PLACES[0]], PLACES[0], STEPS)


@pytest.mark.slow
def test_other_bytes_are_seen(soaked: Soaked, tmp_path: Path) -> None:
    with pytest.raises(Broken, match=r"different bytes at e0-s0-m0"):
        laws.same_bits(soaked.changed(tmp_path, other_bytes, PLACES[0]))
    logs = soaked.changed(tmp_path, other_bytes, *PLACES)
    assert laws.same_bits(logs)
    with pytest.raises(Broken, match="other bytes from"):
        laws.as_undisturbed(soaked.path, soaked.config, logs, 1, SEED)


def samples(**grown: int) -> list[laws.Sample]:
    """A daemon that holds a little more of something in each sample."""
    held = {"pss_bytes": 90 * MIB, "heap_bytes": 60 * MIB, "fds": 20, "threads": 4, "segments": 1}
    values = ({name: value + i * grown.get(name, 0) for name, value in held.items()} for i in range(3 * FEWEST))
    return [laws.Sample(i, i, {("daemon", 1): Footprint(**v)}, 1) for i, v in enumerate(values)]


def test_what_stays_as_it_is_is_flat() -> None:
    assert "nothing grew" in laws.flat(samples())


@pytest.mark.parametrize("what", [{"pss_bytes": MIB}, {"heap_bytes": MIB}, {"fds": 1}, {"threads": 1}, {"segments": 1}])
def test_a_leak_is_seen(what: dict[str, int]) -> None:
    with pytest.raises(Broken, match="grew by"):
        laws.flat(samples(**what))


def test_accidents_follow_from_the_seed_and_leave_the_last_quarter_to_one_daemon() -> None:
    dealt = accidents(random.Random(1), 1000, 200)
    assert dealt == accidents(random.Random(1), 1000, 200) != accidents(random.Random(2), 1000, 200)
    assert max(accident.step for accident in dealt if "daemon" in accident.target) < 750
