"""The peers that `.venv-peers` holds, each set up as its own documentation shows, with two workers.

All store the same encoded bytes (each in its own format) and get the same work: a sample's bytes to tensors.
"""

import itertools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.bench.loader import dataset
from tests.bench.loader.contenders import WORKERS, Contender, nothing
from tests.bench.loader.work import BATCH, SIDE, Prepare, Prepared, Sample, collate, tokens


def energon_index(folder: Path) -> None:
    """Energon's own index, in links to the tars: it writes beside them."""
    from megatron.energon.flavors import BaseWebdatasetFactory

    own = folder / "energon"
    own.mkdir(exist_ok=True)
    names = []
    for path in sorted(folder.glob(dataset.PATTERN)):
        (own / path.name).unlink(missing_ok=True)
        (own / path.name).hardlink_to(path)
        names.append(path.name)
    BaseWebdatasetFactory.prepare_dataset(own, names, split_parts_ratio=[("train", 1.0)], workers=1)
    kind = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    (own / ".nv-meta" / "dataset.yaml").write_text(kind)


@contextmanager
def energon(folder: Path, decoder: str) -> Iterator[Iterator[Prepared]]:
    """Crude samples, a cooker and a task encoder."""
    from megatron.energon import WorkerConfig, get_loader, get_train_dataset

    workers = WorkerConfig(rank=0, world_size=1, num_workers=WORKERS)
    own = get_train_dataset(
        folder / "energon",
        worker_config=workers,
        batch_size=BATCH,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=_energon_encoder(Prepare(decoder)),
    )
    yield iter(get_loader(own))


def _energon_encoder(work: Prepare) -> Any:
    from megatron.energon import Cooker, DefaultTaskEncoder, stateless

    class Encoder(DefaultTaskEncoder):  # type: ignore[type-arg]
        decoder = None
        cookers = (Cooker(stateless(lambda sample: sample)),)

        @stateless
        def encode_sample(self, sample: Any) -> Prepared:
            return work((sample["jpg"], sample["txt"]))

        @stateless
        def batch(self, samples: list[Prepared]) -> Prepared:
            return collate(samples)

    return Encoder()


def mosaic_write(folder: Path) -> None:
    """MDS shards."""
    own = folder / "mosaic"
    if (own / "index.json").exists():
        return
    with _streaming().MDSWriter(out=str(own), columns={"jpg": "bytes", "txt": "bytes"}) as out:
        for jpeg, caption in dataset.samples(folder):
            out.write({"jpg": jpeg, "txt": caption})


@contextmanager
def mosaic(folder: Path, decoder: str) -> Iterator[Iterator[Prepared]]:
    """StreamingDataset in torch's DataLoader."""
    streaming, work = _streaming(), Prepare(decoder)

    class Pictures(streaming.StreamingDataset):  # type: ignore[name-defined,misc]
        def __getitem__(self, at: Any) -> Prepared:
            sample = super().__getitem__(at)
            return work((sample["jpg"], sample["txt"]))

    streaming.base.util.clean_stale_shared_memory()
    own = Pictures(local=str(folder / "mosaic"), batch_size=BATCH)
    loader = torch.utils.data.DataLoader(
        own, batch_size=BATCH, num_workers=WORKERS, collate_fn=collate, persistent_workers=True, drop_last=True
    )
    yield itertools.chain.from_iterable(itertools.repeat(loader))


def _streaming() -> Any:
    """MosaicML Streaming. Its CIFAR and ImageNet classes import torchvision, whose wheel fits no CPU build of torch:
    they get names to import, which nothing here uses.
    """
    import transformers.feature_extraction_utils  # noqa: F401  looks for torchvision when first imported

    names: dict[str, dict[str, Any]] = {
        "torchvision": {},
        "torchvision.datasets": {"VisionDataset": object, "CIFAR10": None},
        "torchvision.transforms": {},
        "torchvision.transforms.functional": {"to_tensor": None},
    }
    for name, members in names.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        sys.modules.setdefault(name, module)
    import streaming

    return streaming


def litdata_write(folder: Path) -> None:
    """LitData chunks."""
    import litdata

    own = folder / "litdata"
    if (own / "index.json").exists():
        return
    held = list(dataset.samples(folder))
    litdata.optimize(
        fn=_Sample(held), inputs=list(range(len(held))), output_dir=str(own), chunk_bytes="64MB", num_workers=1
    )


class _Sample:
    def __init__(self, held: list[Sample]) -> None:
        self.held = held

    def __call__(self, at: int) -> dict[str, bytes]:
        return dict(zip(("jpg", "txt"), self.held[at], strict=True))


@contextmanager
def litdata(folder: Path, decoder: str) -> Iterator[Iterator[Prepared]]:
    """StreamingDataset in LitData's StreamingDataLoader."""
    import litdata as lit

    work = Prepare(decoder)

    class Pictures(lit.StreamingDataset):
        def __getitem__(self, at: Any) -> Prepared:
            sample = super().__getitem__(at)
            return work((bytes(sample["jpg"]), bytes(sample["txt"])))

    loader = lit.StreamingDataLoader(
        Pictures(str(folder / "litdata")),
        batch_size=BATCH,
        num_workers=WORKERS,
        collate_fn=collate,
        persistent_workers=True,
        drop_last=True,
    )
    yield itertools.chain.from_iterable(itertools.repeat(loader))


@contextmanager
def spdl(folder: Path, decoder: str) -> Iterator[Iterator[Prepared]]:
    """A pipeline of threads in this process; as shipped it decodes a batch with its own FFmpeg binding.

    Raises:
        RuntimeError: as shipped, and FFmpeg's shared libraries are not on this machine.
    """
    from spdl.pipeline import PipelineBuilder

    held = list(dataset.samples(folder))
    builder = PipelineBuilder().add_source(itertools.cycle(held))
    if decoder == "pillow":
        _by_ffmpeg(held[:1])
        builder = builder.aggregate(BATCH).pipe(_by_ffmpeg, concurrency=WORKERS)
    else:
        builder = builder.pipe(Prepare(decoder), concurrency=WORKERS).aggregate(BATCH).pipe(collate)
    pipeline = builder.add_sink(2).build(num_threads=WORKERS)
    with pipeline.auto_stop():
        yield iter(pipeline)


def _by_ffmpeg(samples: list[Sample]) -> Prepared:
    import spdl.io

    square = f"crop=min(iw\\,ih):min(iw\\,ih),scale={SIDE}:{SIDE}:flags=bicubic,format=pix_fmts=rgb24"
    pixels = spdl.io.load_image_batch([jpeg for jpeg, _ in samples], width=None, height=None, filter_desc=square)
    return spdl.io.to_torch(pixels), torch.stack([tokens(caption) for _, caption in samples])


PEERS = {
    "energon": Contender("Megatron-Energon", "megatron.energon", energon_index, energon),
    "mosaic": Contender("MosaicML Streaming", "streaming", mosaic_write, mosaic),
    "litdata": Contender("LitData", "litdata", litdata_write, litdata),
    "spdl": Contender("SPDL", "spdl.pipeline", nothing, spdl),
}
