"""Weights in safetensors files: read a `transformers` folder, write one, and start a run from a file of our names.

A file of ours holds whole parts: vision, audio, decoder, projectors or cross_attention. A part that it does not hold
keeps the weights it was seeded with; a part that it holds in pieces is refused. Values are converted in dtype only, and
only on loading into a model.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shared.errors import CheckpointError, ConfigError, writing
from shared.sections import RunConfig
from trainer.models import build
from trainer.models.hf import FAMILIES, Part, PartSection, from_hf, part_of, to_hf
from trainer.models.hf_config import (
    config_to_hf,
    decided_fields,
    family_from_hf,
    family_of,
    patch_from_hf,
    section_from_hf,
)

SHARD_BYTES = 5 * 10**9
MODEL, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
OWN_PARTS = ("projectors", "cross_attention")
"""What no `transformers` family has."""


def load_initial(model: nn.Module, config: RunConfig) -> None:
    """Copy `train.init_from` into the model, or into the pipeline stage of it that this rank holds; "" does nothing.

    Raises:
        CheckpointError: the file cannot be read, or does not fit the whole model.
    """
    if not config.train.init_from:
        return
    path = Path(config.train.init_from)
    held = dict(model.state_dict())
    with open_tensors(path) as file:
        found = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        check_fits(str(path), found, build.shapes(config))
        with torch.no_grad():
            for name in sorted(found.keys() & held.keys()):
                _fill(name, held[name], file.get_tensor(name))


def import_weights(config: RunConfig, folders: Mapping[Part, Path], out: Path) -> list[str]:
    """Write the parts in `folders` (each a `transformers` checkpoint) to one file of our names; return the names.

    Raises:
        ConfigError: a config.json asks for another model than the run file's, or `out` cannot be written.
        CheckpointError: names or shapes do not fit.
    """
    found: dict[str, Tensor] = {}
    for part, folder in folders.items():
        found |= import_part(config, part, folder)
    check_fits("the import", {name: tensor.shape for name, tensor in found.items()}, build.shapes(config))
    with writing("--out", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        save(found, out)
    return sorted(found)


def import_part(config: RunConfig, part: Part, folder: Path) -> dict[str, Tensor]:
    """Our tensors of one `transformers` folder, after holding its config.json against the run file.

    Raises:
        ConfigError: they differ; the text gives the section to set.
        CheckpointError: the folder cannot be read, or its names do not fit.
    """
    theirs = read_config(folder)
    family = family_from_hf(theirs)
    if FAMILIES[family].part != part:
        rule = f"is a {family} checkpoint, which is the {FAMILIES[family].part} part"
        raise ConfigError(f"--{part}", folder, rule, f"give it as --{FAMILIES[family].part}")
    section: PartSection = getattr(config.model, part)
    wanted = section_from_hf(theirs)
    differ = {n: getattr(wanted, n) for n in decided_fields(family) if getattr(wanted, n) != getattr(section, n)}
    if differ:
        text = json.dumps(differ)[1:-1].replace('"', "")
        raise ConfigError(f"model.{part}", "as in the run file", f"is not the model of {folder}", f"set {{{text}}}")
    if part == "vision" and patch_from_hf(theirs) != config.data.image.patch:
        rule = f"must be the patch size of {folder}"
        raise ConfigError("data.image.patch", config.data.image.patch, rule, f"set {patch_from_hf(theirs)}")
    return from_hf(read_tensors(folder), family, section)


def export_weights(config: RunConfig, state: Mapping[str, Tensor], out: Path) -> list[Path]:
    """Write `out/vision`, `out/audio` and `out/decoder` as `transformers` folders.

    Beside them lie files of our names: `projectors.safetensors`, and `cross_attention.safetensors` where there is any.

    Raises:
        ConfigError: no `transformers` family can hold a section (nothing has been written then), or `out` cannot be
            written.
    """
    parts: tuple[Part, ...] = ("vision", "audio", "decoder")
    sections: dict[Part, PartSection] = {part: getattr(config.model, part) for part in parts}
    configs = {p: config_to_hf(s, config.data.image.patch, config.data.batch.tokens) for p, s in sections.items()}
    with writing("--out", out):
        for part, section in sections.items():
            folder = out / part
            folder.mkdir(parents=True, exist_ok=True)
            save_sharded(to_hf(state, family_of(section), section), folder)
            (folder / CONFIG).write_text(json.dumps(configs[part], indent=2) + "\n")
        return [*(out / part for part in parts), *save_own(state, out)]


def save_own(state: Mapping[str, Tensor], out: Path) -> list[Path]:
    """The parts that `transformers` has no form for, a file each in `out`."""
    files = []
    for own in OWN_PARTS:
        if held := {name: x.contiguous() for name, x in state.items() if part_of(name) == own}:
            files.append(out / f"{own}.safetensors")
            save(held, files[-1])
    return files


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a `transformers` folder.

    Raises:
        CheckpointError: there is none that can be read.
    """
    return _read_json(folder / CONFIG)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a `transformers` folder, from its single file or all files of its index.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    index = folder / INDEX
    names = sorted(set(_read_json(index)["weight_map"].values())) if index.exists() else [MODEL]
    found: dict[str, Tensor] = {}
    for name in names:
        with open_tensors(folder / name) as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return found


def save_sharded(tensors: Mapping[str, Tensor], folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write model.safetensors, or several files and their index where they are more than `shard_bytes` in all."""
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        save(shards[0], folder / MODEL)
        return
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save(shard, folder / name)
    places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    total = sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2))


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file.

    Raises:
        OSError: the system refuses it (the library wraps that into an error of its own).
    """
    try:
        save_file(tensors, path, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from None


def open_tensors(path: Path) -> Any:
    """A safetensors file, to be entered with `with`.

    Raises:
        CheckpointError: it cannot be opened.
    """
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors ({error})") from None


def check_fits(source: str, found: Mapping[str, torch.Size], model: Mapping[str, torch.Size]) -> None:
    """Hold that names and shapes are those of whole parts of the model.

    Raises:
        CheckpointError: they are not; everything that is wrong is listed.
    """
    parts = {part_of(name) for name in found}
    wanted = {name for name in model if part_of(name) in parts}
    shapes = {
        n: f"{n} {[*found[n]]} (the model's is {[*model[n]]})" for n in wanted & found.keys() if found[n] != model[n]
    }
    wrong = {"lacks": wanted - found.keys(), "has unknown": found.keys() - wanted, "has wrong shapes": shapes.values()}
    texts = [f"{word} {', '.join(sorted(names))}" for word, names in wrong.items() if names]
    if texts:
        raise CheckpointError(f"{source} does not fit the model: it {'; it '.join(texts)}")


def _fill(name: str, held: Tensor, loaded: Tensor) -> None:
    if held.shape != loaded.shape:
        text = f"{name} is held in shape {[*held.shape]}, train.init_from has it whole, {[*loaded.shape]}"
        raise CheckpointError(f"{text}: load before weights are split")
    held.copy_(loaded)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} is not a JSON object ({error})") from None
