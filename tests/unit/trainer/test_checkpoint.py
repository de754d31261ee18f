"""A checkpoint is whole or it is not there; a damaged, partial or foreign one is never loaded."""

import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from shared.batch import Cursor
from shared.errors import CheckpointError
from shared.mesh import Mesh
from shared.sections import CheckpointSection, RunConfig
from tests.support.ports import free_port
from tests.support.runs import run_config
from trainer import saving
from trainer.checkpoint import Checkpoints, load_random_state
from trainer.launch import Ranks
from trainer.manifest import layout_of, signature_of, verify
from trainer.shard import Box, Entry, Piece
from trainer.source import Source

CURSOR = Cursor(1, 4, 0)
BOX = Box((1000,), (0,), (1000,))
FILE = "state-00000.safetensors"


class Weights:
    """A thousand equal numbers and their moments."""

    def __init__(self, value: int, fails: bool = False) -> None:
        self.values, self.fails = torch.full((1000,), float(value)), fails

    @property
    def value(self) -> float:
        return float(self.values.unique())

    def entries(self) -> dict[str, Entry]:
        if self.fails:
            raise KeyboardInterrupt
        piece = Piece(BOX, 0, 1000)
        return {"weight/w": Entry(self.values, piece), "exp_avg/w": Entry(-self.values, piece)}

    def fill(self, source: Source) -> None:
        self.values.copy_(source.whole("weight/w"))


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
def config(tmp_path: Path) -> RunConfig:
    return run_config(tmp_path, "part-{0..0}.tar", train={"keep": 3})


@pytest.fixture
def store(config: RunConfig, ranks: Ranks) -> Checkpoints:
    return checkpoints(config, ranks)


def checkpoints(config: RunConfig, ranks: Ranks, how: CheckpointSection | None = None) -> Checkpoints:
    folder = Path(config.train.run_dir) / "checkpoints"
    how = how or config.train.checkpoint
    return Checkpoints(folder, ranks, layout_of(config), signature_of(config), config.train.keep, how)


def save(store: Checkpoints, value: int, step: int) -> Path:
    """Save and commit."""
    store.save(Weights(value), step, CURSOR)
    store.finish()
    return store.folder / f"step-{step:08d}"


def loaded(store: Checkpoints) -> tuple[int, float]:
    """Step and value of the newest."""
    weights = Weights(0)
    manifest = store.load_newest(weights)
    assert manifest is not None
    return manifest.step, weights.value


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_was_saved_is_loaded_with_its_cursor(config: RunConfig, ranks: Ranks, asynchronous: bool) -> None:
    store = checkpoints(config, ranks, CheckpointSection(asynchronous=asynchronous))
    save(store, 7, 20)
    weights = Weights(0)
    manifest = store.load_newest(weights)
    assert manifest is not None
    assert (manifest.step, manifest.cursor, weights.value) == (20, CURSOR, 7)
    assert (store.folder / "latest").read_text() == "step-00000020"


def test_random_state_continues_where_it_was(store: Checkpoints) -> None:
    torch.manual_seed(3)
    save(store, 1, 1)
    wanted = torch.rand(4)
    store.load_newest(Weights(0))
    assert torch.equal(torch.rand(4), wanted)


def test_what_was_saved_on_a_cpu_goes_on_on_a_gpu_whose_generator_it_lacks(store: Checkpoints) -> None:
    torch.manual_seed(3)
    save(store, 1, 1)
    wanted = torch.rand(4)
    load_random_state(Ranks(Mesh(), 0, torch.device("cuda")), Source(store.folder / "step-00000001"))
    assert torch.equal(torch.rand(4), wanted)


def test_nothing_saved_means_nothing_loaded(store: Checkpoints) -> None:
    assert store.load_newest(Weights(0)) is None


def test_what_changes_after_a_save_has_begun_is_not_saved(store: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_back(monkeypatch) as go_on:
        weights = Weights(7)
        store.save(weights, 1, CURSOR)
        weights.values.fill_(8)
        go_on()
    store.finish()
    assert loaded(store) == (1, 7)


def test_a_checkpoint_counts_only_once_it_is_written(store: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1, 1)
    with held_back(monkeypatch) as go_on:
        store.save(Weights(2), 2, CURSOR)
        store.poll()
        assert (store.folder / "latest").read_text() == "step-00000001"
        assert not (store.folder / "step-00000002").exists()
        go_on()
    store.finish()
    assert (store.folder / "latest").read_text() == "step-00000002"


def test_a_second_save_waits_for_the_first_and_says_so(
    store: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with held_back(monkeypatch) as go_on:
        store.save(Weights(1), 1, CURSOR)
        go_on()
        store.save(Weights(2), 2, CURSOR)
    store.finish()
    assert "step 2 waits: checkpoint 1 is still being written" in caplog.text
    assert [step for step in (1, 2) if verify(store.folder / f"step-{step:08d}")] == [1, 2]


def test_a_disk_that_takes_too_long_ends_the_run(
    config: RunConfig, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = checkpoints(config, ranks, CheckpointSection(write_s=0.01))
    with held_back(monkeypatch):
        store.save(Weights(1), 1, CURSOR)
        with pytest.raises(CheckpointError, match=r"not written within train.checkpoint.write_s \(0.01\); raise it"):
            store.finish()
    assert not (store.folder / "latest").exists()


@contextmanager
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Writers pause before their first byte until the yielded function is called, at the latest until the end."""
    gate, write = Event(), saving.write_image
    monkeypatch.setattr(saving, "write_image", lambda *arguments: gate.wait(60) and write(*arguments))
    try:
        yield gate.set
    finally:
        gate.set()


@contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond the limit."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_ends_the_run_and_costs_nothing_committed(
    config: RunConfig, ranks: Ranks, asynchronous: bool
) -> None:
    store = checkpoints(config, ranks, CheckpointSection(asynchronous=asynchronous))
    save(store, 1, 1)
    text = r"step-00000002.tmp/state-00000.safetensors cannot be written \(File too large\); make room there or lower"
    with full_disk(4096), pytest.raises(CheckpointError, match=text):
        save(store, 2, 2)
    assert not list(store.folder.rglob("step-00000002*/*"))
    assert (store.folder / "latest").read_text() == "step-00000001"
    assert loaded(store) == (1, 1)
    save(store, 3, 3)
    assert loaded(store) == (3, 3)


def test_a_disk_that_is_full_at_the_commit_is_the_same_error(store: Checkpoints) -> None:
    save(store, 1, 1)
    store.save(Weights(2), 2, CURSOR)
    assert store._pending is not None
    store._pending.writer.wait(60)
    with full_disk(16), pytest.raises(CheckpointError, match=r"step-00000002.tmp cannot be written"):
        store.finish()
    assert loaded(store) == (1, 1)


def test_a_rank_that_cannot_write_ends_all_ranks_and_commits_nothing(store: Checkpoints) -> None:
    class WithAnother(Ranks):
        """As if a second rank had said that it failed."""

        def sum(self, values: Sequence[int]) -> list[int]:
            return [values[0], values[1] + 1]

    save(store, 1, 1)
    store._ranks = WithAnother(Mesh(), 0, torch.device("cpu"))
    store.save(Weights(2), 2, CURSOR)
    with pytest.raises(CheckpointError, match=r"1 other rank\(s\) could not write .*step-00000002.tmp; they say why"):
        store.finish()
    assert (store.folder / "latest").read_text() == "step-00000001"


def test_a_save_cut_short_leaves_the_older_one_in_force(store: Checkpoints) -> None:
    save(store, 1, 1)
    with pytest.raises(KeyboardInterrupt):
        store.save(Weights(2, fails=True), 2, CURSOR)
    assert loaded(store) == (1, 1)
    save(store, 3, 3)
    assert not list(store.folder.glob("*.tmp"))


def cut(folder: Path) -> None:
    (folder / FILE).write_bytes(b"")


def flip(folder: Path) -> None:
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def lose(folder: Path) -> None:
    (folder / FILE).unlink()


def add(folder: Path) -> None:
    (folder / "weights2.pt").write_bytes(b"9")


def unlist(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def scrawl(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b'{"step":')


def age(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b'{"step": 2, "files": {}}')


def lose_sectors(folder: Path) -> None:
    """A file of as many bytes as were saved that the system cannot read: page 0 of a process's memory."""
    (folder / FILE).unlink()
    (folder / FILE).symlink_to("/proc/self/mem")
    tree = msgspec.json.decode((folder / "manifest.json").read_bytes())
    tree["files"][FILE]["size_bytes"] = (folder / FILE).stat().st_size
    (folder / "manifest.json").write_bytes(msgspec.json.encode(tree))


DAMAGES = [
    (cut, "0 bytes"),
    (flip, "damaged"),
    (lose, "state-00000"),
    (add, "weights2"),
    (lose_sectors, r"cannot be read \(Input/output error\)"),
    (unlist, "read"),
    (scrawl, "not a"),
    (age, "is of format 1, this version reads 2: load it with the version that saved it"),
]


@pytest.mark.parametrize(("damage", "word"), DAMAGES)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    store: Checkpoints, damage: Callable[[Path], None], word: str
) -> None:
    save(store, 1, 1)
    damage(save(store, 2, 2))
    with pytest.raises(CheckpointError, match=f"step-00000002.*{word}"):
        verify(store.folder / "step-00000002")
    assert loaded(store) == (1, 1)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(
    store: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    cut(save(store, 1, 1))
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used; the log of rank 0 says why of each"):
        store.load_newest(Weights(0))
    assert "checkpoint step-00000001 passed over" in caplog.text


FOREIGN = [
    ("data.seed", "data.seed (0), asked is (1); its cursor is a place in other data: restore"),
    ("model.decoder.rope_theta", "model.decoder.rope_theta (10000.0), asked is (1.0); restore the model section"),
    ("train.precision", "train.precision (fp32), asked is (bf16); restore"),
    ("train.optim.name", "train.optim.name (adamw), asked is (sgd); restore"),
]
VALUES = {"data.seed": 1, "model.decoder.rope_theta": 1.0, "train.precision": "bf16", "train.optim.name": "sgd"}


@pytest.mark.parametrize(("key", "text"), FOREIGN)
def test_a_checkpoint_of_another_run_is_refused_with_both_values(
    store: Checkpoints, config: RunConfig, ranks: Ranks, key: str, text: str
) -> None:
    save(store, 1, 1)
    with pytest.raises(CheckpointError) as failure:
        checkpoints(changed(config, key.split("."), VALUES[key]), ranks).load_newest(Weights(0))
    assert f"checkpoint step-00000001 was saved with {text}" in str(failure.value)


def changed(section: Any, path: list[str], value: object) -> Any:
    """The section with one key set."""
    key, *rest = path
    return msgspec.structs.replace(section, **{key: changed(getattr(section, key), rest, value) if rest else value})


def rewrite(folder: Path, edit: Callable[[Any], object]) -> None:
    """Change a manifest's signature, as another version would have written it."""
    path = folder / "manifest.json"
    tree = msgspec.json.decode(path.read_bytes())
    edit(tree["signature"])
    path.write_bytes(msgspec.json.encode(tree))


def test_a_key_that_this_version_has_added_has_its_default_in_an_older_checkpoint(store: Checkpoints) -> None:
    rewrite(save(store, 1, 1), lambda signature: signature["model"]["decoder"].pop("qkv_bias"))
    assert loaded(store) == (1, 1)


def test_an_added_key_that_is_not_at_its_default_is_a_difference(
    store: Checkpoints, config: RunConfig, ranks: Ranks
) -> None:
    rewrite(save(store, 1, 1), lambda signature: signature["model"]["decoder"].pop("qkv_bias"))
    other = checkpoints(changed(config, ["model", "decoder", "qkv_bias"], True), ranks)
    with pytest.raises(CheckpointError, match=r"saved with model\.decoder\.qkv_bias \(False\), asked is \(True\)"):
        other.load_newest(Weights(0))


def test_a_key_of_a_newer_version_is_refused_in_words(store: Checkpoints) -> None:
    rewrite(save(store, 1, 1), lambda signature: signature["model"]["decoder"].update(window=64))
    text = r"a model section that this version does not know \(.*`window`.*\); load it with the version that saved it"
    with pytest.raises(CheckpointError, match=text):
        store.load_newest(Weights(0))


def test_only_the_newest_are_kept(store: Checkpoints) -> None:
    for step in range(1, 6):
        save(store, step, step)
    assert sorted(p.name for p in store.folder.glob("step-*")) == [f"step-{s:08d}" for s in (3, 4, 5)]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_one_that_a_run_went_back_behind_pushes_no_good_one_out(
    config: RunConfig, ranks: Ranks, keep: int
) -> None:
    store = checkpoints(config, ranks)
    save(store, 1, 1)
    cut(save(store, 9, 9))
    assert loaded(store) == (1, 1)
    store = checkpoints(changed(config, ["train", "keep"], keep), ranks)
    for step in (2, 3, 4):
        save(store, step, step)
        assert loaded(store) == (step, step)
    assert sorted(p.name for p in store.folder.glob("step-*"))[:-1] == [f"step-{s:08d}" for s in range(5 - keep, 5)]


def test_saving_a_step_again_replaces_it(store: Checkpoints) -> None:
    save(store, 1, 1)
    save(store, 5, 1)
    assert loaded(store) == (1, 5)
