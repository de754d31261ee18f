"""Shards with faults: exact byte cuts, links, unsafe names; a data section over them; a small tokenizer."""

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from dataloader_svc.index import BuildReport, Index, build
from dataloader_svc.shards import expand
from dataloader_svc.text import SPECIALS
from shared.sections import DataSection, DatasetSection, ImageSection, TextSection
from tests.support.media import Member, photo, write_tar


def data_section(*shards: Path | str, **changes: Any) -> DataSection:
    """A data section of one dataset `set` over the shards, with `changes` to its fields."""
    plain = {"image": ImageSection(pixel_budget=64 * 64), "text": TextSection(max_tokens=48)}
    return DataSection((DatasetSection("set", tuple(map(str, shards))),), **{**plain, **changes})


def built(data: DataSection, index_dir: Path | None = None) -> tuple[Index, BuildReport]:
    """The data section's shards, indexed and opened."""
    shards = expand(data.datasets, data.missing_shards)
    report = build(shards, data, index_dir)
    return Index.open(shards, data, index_dir), report


def tar4(path: Path, cut: int | None = None, first: str = "000") -> Path:
    """Samples 000..003, each a jpg of 1000 bytes then a txt of 2: 2560 bytes a sample. Cut at byte `cut`."""
    number = int(first)
    jpg = photo(24, 16)
    jpg = jpg[:-2] + bytes(1000 - len(jpg)) + jpg[-2:]
    members: list[Member] = []
    for i in range(number, number + 4):
        members += [(f"{i:03d}.jpg", jpg), (f"{i:03d}.txt", b"ok")]
    write_tar(path, members)
    if cut is not None:
        path.write_bytes(path.read_bytes()[:cut])
    return path


def write_entries(path: Path, entries: Sequence[tarfile.TarInfo | Member], form: int = tarfile.GNU_FORMAT) -> Path:
    """A tar of ready headers (links, folders, devices) and plain members, in order."""
    with tarfile.open(path, "w", format=form) as tar:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                tar.addfile(entry)
                continue
            info = tarfile.TarInfo(entry[0])
            info.size = len(entry[1])
            tar.addfile(info, io.BytesIO(entry[1]))
    return path


def entry(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    """A header without payload: `tarfile.SYMTYPE` and its like."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def trained(path: Path, specials: tuple[str, ...] = SPECIALS) -> str:
    """A small byte-level BPE tokenizer saved at `path`, with a template and a truncation that must not show."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(["a street with a car", "a car by the sea"] * 10, trainer)
    if "<bos>" in specials:
        model.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    model.enable_truncation(3)
    model.save(str(path))
    return str(path)
