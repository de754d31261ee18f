"""A checkpoint is whole or it is not there; a damaged, partial or foreign one is never loaded."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from shared.batch import Cursor
from shared.errors import CheckpointError
from shared.mesh import Mesh
from tests.support.ranks import free_port
from trainer.checkpoint import Checkpoints
from trainer.launch import Ranks
from trainer.manifest import Signature, verify

HERE = Signature("pipe 1, data 2, tensor 1, ZeRO 1", "d1", "m1", "fp32 adamw")
CURSOR = Cursor(1, 4, 0)


class Weights:
    """One number, kept in two files."""

    def __init__(self, value: int, fails: bool = False) -> None:
        self.value, self.fails = value, fails

    def save(self, folder: Path, tag: str) -> None:
        (folder / tag / "deep").mkdir(parents=True)
        (folder / tag / "weights.pt").write_bytes(b"%d" % self.value)
        if self.fails:
            raise KeyboardInterrupt
        (folder / tag / "deep" / "moments.pt").write_bytes(b"%d" % -self.value)

    def load(self, folder: Path, tag: str) -> None:
        self.value = int((folder / tag / "weights.pt").read_bytes())


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    old = {name: os.environ.get(name) for name in store}
    os.environ.update(store)
    dist.init_process_group("gloo")
    yield Ranks(Mesh(), 0, torch.device("cpu"))
    dist.destroy_process_group()
    for name, value in old.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture
def store(tmp_path: Path, ranks: Ranks) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", ranks, HERE, keep=3)


def test_what_was_saved_is_loaded_with_its_cursor(store: Checkpoints) -> None:
    store.save(Weights(7), 20, CURSOR)
    weights = Weights(0)
    manifest = store.load_newest(weights)
    assert manifest is not None
    assert (manifest.step, manifest.cursor, weights.value) == (20, CURSOR, 7)
    assert (store.folder / "latest").read_text() == "step-00000020"


def test_random_state_continues_where_it_was(store: Checkpoints) -> None:
    torch.manual_seed(3)
    store.save(Weights(1), 1, CURSOR)
    wanted = torch.rand(4)
    store.load_newest(Weights(0))
    assert torch.equal(torch.rand(4), wanted)


def test_a_slow_rank_needs_nothing_of_a_folder_that_a_fast_one_may_have_renamed(store: Checkpoints) -> None:
    class RenamedAtOnce(Ranks):
        """A rank that hears the sum only after the main rank has committed."""

        def sum(self, values: Sequence[int]) -> list[int]:
            found = super().sum(values)
            partial.rename(store.folder / "step-00000001")
            return found

    partial = store.folder / "step-00000001.tmp"
    partial.mkdir(parents=True)
    Weights(7).save(store.folder, partial.name)
    slow = Checkpoints(store.folder, RenamedAtOnce(Mesh(), 0, torch.device("cpu")), HERE, keep=3)
    assert {name: entry.size_bytes for name, entry in slow._hash_together(partial).items()} == {
        "deep/moments.pt": 2,
        "weights.pt": 1,
    }


def test_nothing_saved_means_nothing_loaded(store: Checkpoints) -> None:
    assert store.load_newest(Weights(0)) is None


def test_a_save_cut_short_leaves_the_older_one_in_force(store: Checkpoints) -> None:
    store.save(Weights(1), 1, CURSOR)
    with pytest.raises(KeyboardInterrupt):
        store.save(Weights(2, fails=True), 2, CURSOR)
    weights = Weights(0)
    store.load_newest(weights)
    assert weights.value == 1
    store.save(Weights(3), 3, CURSOR)
    assert not list(store.folder.glob("*.tmp"))


def cut(folder: Path) -> None:
    (folder / "weights.pt").write_bytes(b"")


def flip(folder: Path) -> None:
    (folder / "deep" / "moments.pt").write_bytes(b"-3")


def lose(folder: Path) -> None:
    (folder / "deep" / "moments.pt").unlink()


def add(folder: Path) -> None:
    (folder / "weights2.pt").write_bytes(b"9")


def unlist(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def scrawl(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b'{"step":')


DAMAGES = [
    (cut, "0 bytes"),
    (flip, "damaged"),
    (lose, "moments"),
    (add, "weights2"),
    (unlist, "read"),
    (scrawl, "not a"),
]


@pytest.mark.parametrize(("damage", "word"), DAMAGES)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    store: Checkpoints, damage: Callable[[Path], None], word: str
) -> None:
    store.save(Weights(1), 1, CURSOR)
    damage(store.save(Weights(2), 2, CURSOR))
    with pytest.raises(CheckpointError, match=f"step-00000002.*{word}"):
        verify(store.folder / "step-00000002")
    weights = Weights(0)
    manifest = store.load_newest(weights)
    assert manifest is not None
    assert (manifest.step, weights.value) == (1, 1)


@pytest.mark.parametrize("part", ["layout", "data", "model", "training"])
def test_a_checkpoint_of_another_run_is_refused_with_both_values(store: Checkpoints, ranks: Ranks, part: str) -> None:
    store.save(Weights(1), 1, CURSOR)
    other = Checkpoints(store.folder, ranks, msgspec.structs.replace(HERE, **{part: "another"}), keep=3)
    text = (
        rf"step-00000001 was saved with {part} \({getattr(HERE, part)}\), asked is \(another\); .*(restore|resume with)"
    )
    with pytest.raises(CheckpointError, match=text):
        other.load_newest(Weights(0))


def test_only_the_newest_are_kept(store: Checkpoints) -> None:
    for step in range(1, 6):
        store.save(Weights(step), step, CURSOR)
    assert sorted(p.name for p in store.folder.glob("step-*")) == [f"step-{s:08d}" for s in (3, 4, 5)]


def test_saving_a_step_again_replaces_it(store: Checkpoints) -> None:
    store.save(Weights(1), 1, CURSOR)
    store.save(Weights(5), 1, CURSOR)
    weights = Weights(0)
    store.load_newest(weights)
    assert weights.value == 5
