"""Batches on the device they are wanted on, each as the number of its images once its copy is queued.

On CUDA every way copies to one of two device buffers in turn, on the stream that is current. On a CPU batches are left
as they are handed over.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from shared import mps
from shared.config import endpoint, load
from tests.bench.loader_gpu.work import SIDE, Feed, Loader, Torch
from trainer.batches import Batch
from trainer.client import LoaderClient

CREDITS, PREFETCH = 3, 4


class Landing:
    """Two device buffers; a batch's slot is given back when its copy is done."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._turn = 0

    def take(self, batch: Batch) -> int:
        """Queue the copy, unless the pixels are on the device already."""
        if not torch.cuda.is_available() or batch.pixels is not None:
            return batch.counts.images
        place, self._turn = self._turn % 2, self._turn + 1
        if place == len(self._buffers):
            self._buffers.append(torch.empty(batch.payload.nbytes, dtype=torch.uint8, device="cuda"))
            self._copied.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        self._copied[place].synchronize()
        self._buffers[place][: batch.payload.nbytes].copy_(batch.payload, non_blocking=True)
        self._copied[place] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied[place].record()
        batch.release(self._copied[place])
        return batch.counts.images


@contextmanager
def opened(feed: Feed) -> Iterator[Iterator[int]]:
    """The feed's endless batches."""
    with (_loader if isinstance(feed, Loader) else _torch)(feed) as batches:  # type: ignore[operator]
        yield batches


@contextmanager
def _loader(feed: Loader) -> Iterator[Iterator[int]]:
    config, landing = load(Path(feed.run)), Landing()
    mps.join(config.loader)
    with LoaderClient(endpoint(config), job=config.job, credits=CREDITS, lane=feed.lane) as client:
        yield (landing.take(batch) for batch in client)


@contextmanager
def _torch(feed: Torch) -> Iterator[Iterator[int]]:
    import webdataset as wds

    shards = sorted(map(str, Path(feed.folder).glob("*.tar")))
    samples = wds.WebDataset(shards, shardshuffle=False, resampled=True).to_tuple("jpg").map(_pillow)
    batches = samples.batched(feed.batch, collation_fn=_stacked, partial=False)
    cuda = torch.cuda.is_available()
    yield _sent(
        iter(
            torch.utils.data.DataLoader(
                batches, batch_size=None, num_workers=feed.workers, pin_memory=cuda, prefetch_factor=PREFETCH
            )
        )
    )


def _sent(batches: Iterator[torch.Tensor]) -> Iterator[int]:
    cuda = torch.cuda.is_available()
    for pixels in batches:
        yield len(pixels.to("cuda", non_blocking=True) if cuda else pixels)


def _pillow(sample: tuple[bytes]) -> torch.Tensor:
    picture = ImageOps.exif_transpose(Image.open(io.BytesIO(sample[0]))).convert("RGB")
    return torch.from_numpy(np.array(ImageOps.fit(picture, (SIDE, SIDE), Image.Resampling.BICUBIC)))


def _stacked(samples: list[Any]) -> torch.Tensor:
    return torch.stack(samples)
