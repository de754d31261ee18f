"""A run that starts from published weights, one that is exported, and the shipped sizes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.config import load
from shared.errors import CheckpointError, ConfigError
from shared.mesh import Mesh
from shared.sections import RunConfig
from tests.support.hugging import RUN, fitting_run, saved
from tests.support.layouts import whole_weights
from tests.support.packs import MIXED, global_batch
from tests.support.ranks import ROOT, run_ranks
from tests.support.runs import run_config, run_file
from trainer.loss import token_loss
from trainer.models import build
from trainer.models.hf import Part
from trainer.source import read_checkpoint
from trainer.weights import import_weights, load_initial

PARTS: dict[Part, str] = {"vision": "clip", "audio": "whisper", "decoder": "qwen2-tied"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Part, Path]:
    found: dict[Part, Path] = {}
    for part, name in PARTS.items():
        found[part] = tmp_path_factory.mktemp(part)
        saved(name, found[part])
    return found


def test_a_model_starts_from_the_imported_parts_and_keeps_its_seed_elsewhere(
    folders: dict[Part, Path], tmp_path: Path
) -> None:
    config = fitting_run(tmp_path, init_from=str(tmp_path / "init.safetensors"))
    import_weights(config, folders, tmp_path / "init.safetensors")
    file = load_file(tmp_path / "init.safetensors")
    model = build.build(config, "sdpa")
    seeded = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    load_initial(model, config)
    for name, tensor in model.state_dict().items():
        tied = name == "3.vocabulary.weight"
        assert torch.equal(tensor, file.get("0.embedding.weight" if tied else name, seeded[name])), name
    assert {name for name in seeded if name not in file} == {
        *(
            f"0.{part}_projector.{x}.{y}"
            for part in ("vision", "audio")
            for x in ("up", "down")
            for y in ("weight", "bias")
        ),
        "3.vocabulary.weight",
    }


def test_relative_to_the_run_file(tmp_path: Path) -> None:
    assert fitting_run(tmp_path, init_from="init.safetensors").train.init_from == str(tmp_path / "init.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(("pipe", "tensor"), [(1, 1), (2, 1), (2, 2)])
def test_step_0_uses_the_file_and_the_checkpoint_exports_what_was_trained(
    pipe: int, tensor: int, tmp_path: Path
) -> None:
    path = trainable_run(tmp_path, pipe, tensor)
    config = load(path)
    wanted = save_random_start(config, tmp_path / "init.safetensors")
    store = tmp_path / "store"
    task = {"config": str(path), "cases": {"case": []}, "plans": "MIXED", "steps": 1, "save_every": 1}
    report = run_ranks(
        "tests.support.step_program", pipe * tensor, tmp_path / "out", {**task, "checkpoints": str(store)}
    )[0]
    assert report["case"]["losses"][0] == pytest.approx(wanted, rel=1e-5)
    state = read_checkpoint(config, store / "step-00000001")
    assert state.keys() == build.shapes(config).keys()
    trained = whole_weights(tmp_path / "out", "case", Mesh(pipe=pipe, tensor=tensor))
    assert trained.keys() == state.keys() - {"0.audio.positions_LC"}
    assert all(np.array_equal(state[name].numpy(), array) for name, array in trained.items())
    command("export", "--config", path, "--checkpoint", store / "step-00000001", "--out", tmp_path / "hf")
    again = [argument for part in PARTS for argument in (f"--{part}", tmp_path / "hf" / part)]
    command("import-weights", "--config", path, *again, "--out", tmp_path / "again.safetensors")
    parts = load_file(tmp_path / "again.safetensors") | load_file(tmp_path / "hf" / "projectors.safetensors")
    assert parts.keys() == state.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in parts.items())


def trainable_run(folder: Path, pipe: int, tensor: int) -> Path:
    """A run file whose head is tied where it can be."""
    decoder = {**RUN["model"]["decoder"], "tied": pipe * tensor == 1}
    data = {**RUN["data"], "batch": {"micro_batches": 8}}
    train, mesh = {"init_from": "init.safetensors"}, {"pipe": pipe, "tensor": tensor}
    model = {**RUN["model"], "decoder": decoder}
    return run_file(folder, "part-{0..0}.tar", data=data, model=model, train=train, mesh=mesh)


def save_random_start(config: RunConfig, path: Path) -> float:
    """Save weights that no seed gives; return their loss on the first global batch."""
    model = build.build(config, "sdpa")
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.05)
        if "audio.blocks" in name and name.endswith("qkv.bias"):
            parameter.data.chunk(3)[1].zero_()
    batch = global_batch(config, MIXED, seed=0)
    with torch.no_grad():
        loss = sum(float(token_loss(model(inputs), *targets)) for inputs, targets in batch) / len(batch)
    state = model.state_dict()
    save_file({name: state[name] for name in build.shapes(config)}, path)
    return loss


def command(*arguments: object) -> None:
    """Run the trainer's command line; it must end well."""
    line = [sys.executable, "-m", "trainer", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_file_of_another_model_is_refused_with_all_that_is_wrong(folders: dict[Part, Path], tmp_path: Path) -> None:
    config = fitting_run(tmp_path, init_from="init.safetensors")
    tensors = {name: torch.zeros(shape) for name, shape in build.shapes(config).items() if name[0] != "0"}
    tensors["9.odd"] = tensors["1.q.weight"] = torch.zeros(1)
    del tensors["2.up.weight"]
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "init.safetensors")
    wrong = r"lacks 0\.embedding\.weight, 2\.up\.weight; it has unknown 9\.odd; it has wrong shapes 1\.q\.weight \[1\]"
    with pytest.raises(CheckpointError, match=wrong):
        load_initial(build.build(config, "sdpa"), config)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    config = fitting_run(tmp_path, init_from="none.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load_initial(build.build(config, "sdpa"), config)


def test_a_run_file_of_another_model_is_told_what_to_set(folders: dict[Part, Path], tmp_path: Path) -> None:
    config = run_config(tmp_path, "part-{0..0}.tar")
    with pytest.raises(ConfigError, match=r"model\.vision .* set \{depth: 2, heads: 4, mlp: 48, class_token: true"):
        import_weights(config, {"vision": folders["vision"]}, tmp_path / "x")
    with pytest.raises(ConfigError, match="is a whisper checkpoint, which is the audio part"):
        import_weights(config, {"vision": folders["audio"]}, tmp_path / "x")


@pytest.mark.parametrize("axis", ["pipe", "tensor"])
def test_a_tied_head_is_refused_where_it_would_be_two_weights(tmp_path: Path, axis: str) -> None:
    config = run_config(tmp_path, "part-{0..0}.tar", **RUN, mesh={axis: 2})
    with pytest.raises(ConfigError, match=r"model\.decoder\.tied \(True\) needs mesh\.pipe 1"):
        build.layers(config, "sdpa")


def test_the_shipped_sizes_are_those_of_the_published_models() -> None:
    config = load(ROOT / "deploy" / "configs" / "clip-l-whisper-small-3b.yaml")
    counts, tied = build.parameter_counts(config), 151_936 * 2048
    projectors = (4096 + 1) * 2048 + (768 * 10 + 1) * 2048 + 2 * (2048 + 1) * 2048
    clip_l, whisper_small_encoder, qwen_3b = 303_507_456, 88_154_112 - 1500 * 768, 3_085_938_688
    key_biases = 12 * 768
    assert sum(counts) - tied == clip_l + whisper_small_encoder + key_biases + qwen_3b + projectors
    assert sum(build.parameter_counts(load(ROOT / "deploy" / "configs" / "debug.yaml"))) < 1_000_000
