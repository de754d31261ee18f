"""The order with real daemons: the same global batches for any ranks, workers, daemons, hosts; steps passed over."""

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dataloader_svc.verify import read_logs
from shared.batch import Cursor
from shared.config import endpoint, load
from shared.sections import RunConfig
from shared.wire import Batch
from tests.support.daemons import Daemon, make_run, make_run_file, serving
from tests.support.reader import RawReader
from tests.support.reading import line_of
from tests.support.trainers import verify
from trainer.client import LoaderClient

pytestmark = pytest.mark.slow

STEPS = 8
START = Cursor()
BATCH = {"tokens": 256, "micro_batches": 8, "round": 8}
LOADER = {"max_streams": 8, "slots_per_stream": 2, "metrics_port": 0}
SKIPS = "data.skip_steps=[[2, 4], [6, 7]]"

Host = tuple[Path, RunConfig, Daemon]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A daemon of one worker."""
    path, config = make_run(tmp_path_factory.mktemp("here"), 96, 4, data={"batch": BATCH}, loader=LOADER)
    with serving(path, PYTHONHASHSEED="1") as daemon:
        yield path, config, daemon


@pytest.fixture(scope="module")
def there(here: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Another host: the tars copied last to first, three workers, another hash seed, another working folder."""
    folder = tmp_path_factory.mktemp("there")
    (folder / "data").mkdir()
    for tar in sorted((here[0].parent / "data").glob("*.tar"), reverse=True):
        shutil.copyfile(tar, folder / "data" / tar.name)
    loader = {**LOADER, "workers": 3, "threads": 1}
    path, config = make_run_file(folder, data={"batch": BATCH}, loader=loader)
    with serving(path, cwd=folder, PYTHONHASHSEED="77", LC_ALL="C", TZ="Asia/Tokyo") as daemon:
        yield path, config, daemon


def read(config: RunConfig, rank: int, ranks: int, steps: int = STEPS, start: Cursor = START) -> list[Batch]:
    with RawReader(config, rank, ranks) as reader:
        reader.join(start)
        batches = reader.read(steps * BATCH["micro_batches"] // ranks)
        reader.bye()
    return batches


def told(batches: list[Batch]) -> dict[str, tuple[int, tuple[int, ...], int]]:
    return {b.batch_id: (b.checksum, b.sample_ids, b.step_labels) for b in batches}


@pytest.fixture(scope="module")
def alone(here: Host) -> dict[str, tuple[int, tuple[int, ...], int]]:
    """What one rank reads."""
    return told(read(here[1], 0, 1))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_any_ranks_over_any_daemons_and_workers_read_the_same_global_batches(
    here: Host, there: Host, alone: dict[str, tuple[int, tuple[int, ...], int]], ranks: int
) -> None:
    hosts = [there[1]] if ranks == 1 else [here[1], there[1]]
    batches = [b for rank in range(ranks) for b in read(hosts[rank % len(hosts)], rank, ranks)]
    assert told(batches) == alone
    for at in {b.cursor for b in batches}:
        together = [b for b in batches if b.cursor == at]
        assert len(together) == ranks
        assert len({b.group for b in together}) == 1
        ids = [i for b in batches if b.cursor.step == at.step and b.cursor.epoch == at.epoch for i in b.sample_ids]
        assert len(set(ids)) == len(ids)
    assert all(1.0 <= b.imbalance < 4 for b in batches if ranks > 1)
    assert ranks > 1 or {b.imbalance for b in batches} == {1.0}


def test_epochs_differ_in_order_and_agree_in_what_they_hold(here: Host, there: Host) -> None:
    first = read(here[1], 0, 1, 30)
    second = read(there[1], 0, 1, 30, Cursor(1))
    ids = [
        [i for b in batches if b.cursor.epoch == n for i in b.sample_ids] for n, batches in enumerate((first, second))
    ]
    assert sorted(ids[0]) == sorted(ids[1]) == list(range(96))
    assert ids[0] != ids[1]
    assert told(read(here[1], 0, 1, 3, Cursor(1))).items() <= told(second).items()


# --- steps passed over, and a change of ranks ---


def consume(config: RunConfig, folder: Path, ranks: int, start: Cursor, steps: int) -> Cursor:
    """Read `steps` global batches as trainers of `ranks` ranks do, appending to their logs; the cursor after."""
    after = set()
    for rank in range(ranks):
        with (
            LoaderClient(endpoint(config), data=config.data, data_rank=rank, data_ranks=ranks, cursor=start) as client,
            (folder / f"consumed-{rank}.jsonl").open("ab") as log,
        ):
            for batch in itertools.islice(client, steps * BATCH["micro_batches"] // ranks):
                log.write(msgspec.json.encode(line_of(batch, rank, ranks)) + b"\n")
            after.add(client.position)
    assert len(after) == 1
    return after.pop()


def test_skipped_steps_are_passed_over_exactly_while_ranks_come_and_go(here: Host, tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(here[0].parent / "data")
    path, _ = make_run_file(tmp_path, data={"batch": BATCH}, loader={**LOADER, "workers": 2})
    config = load(path, [SKIPS])
    with serving(path, "--set", SKIPS) as daemon:
        at = consume(config, tmp_path, 2, Cursor(), 2)
        assert at == Cursor(0, 2)
        at = consume(config, tmp_path, 4, at, 1)
        assert at == Cursor(0, 5)
        at = consume(config, tmp_path, 1, at, 2)
        assert at == Cursor(1)
        assert "passing over steps 2 to 3" in daemon.log
    seen = [line for log in read_logs(sorted(tmp_path.glob("consumed-*"))) for line in log]
    assert {x.step for x in seen} == {0, 1, 4, 5, 7}
    plain = {b.batch_id for b in read(here[1], 0, 1) if b.cursor.step not in (2, 3, 6)}
    assert {x.batch_id for x in seen} == plain
    proof = verify(path, tmp_path, "--set", SKIPS)
    assert proof.returncode == 0, proof.stdout + proof.stderr
    assert "passed over on request: 3 steps" in proof.stdout
    unasked = verify(path, tmp_path)
    assert unasked.returncode == 1
    assert "not in data.skip_steps: 3 steps" in unasked.stdout


def test_a_reader_in_the_middle_of_skipped_steps_is_taken_behind_them(here: Host, tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(here[0].parent / "data")
    path, _ = make_run_file(tmp_path, data={"batch": BATCH}, loader=LOADER)
    config = load(path, [SKIPS])
    with serving(path, "--set", SKIPS):
        for start in (Cursor(0, 2), Cursor(0, 3), Cursor(0, 3, 1), Cursor(0, 4)):
            batch = read(config, 3, 4, 1, start)[0]
            assert (batch.cursor, batch.skipped_from) == (Cursor(0, 4), Cursor(0, 2))
