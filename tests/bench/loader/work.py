"""What every loader delivers: 32 pictures, uint8 [32, 336, 336, 3], and their captions' tokens, int64 [32, 32].

A decoder takes a JPEG's bytes to [336, 336, 3]: the largest centred square, resized. `pillow` is what loaders ship
with: they hand out Pillow images, and the resize is Pillow's. `reduced` is Millstream's, from its own module.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

SIDE, BATCH, TOKENS = 336, 32, 32

Sample = tuple[bytes, bytes]
"""JPEG and UTF-8 caption."""
Decode = Callable[[bytes], "np.ndarray[Any, np.dtype[np.uint8]]"]
Prepared = tuple[torch.Tensor, torch.Tensor]
"""Pixels and tokens, of a sample or of a batch."""


def pillow(jpeg: bytes) -> Any:
    """Full decode, EXIF, centre crop, bicubic."""
    import io

    from PIL import Image, ImageOps

    picture = ImageOps.exif_transpose(Image.open(io.BytesIO(jpeg)).convert("RGB"))
    return np.array(ImageOps.fit(picture, (SIDE, SIDE), Image.Resampling.BICUBIC))


def reduced(jpeg: bytes) -> Any:
    """Millstream's CPU decode. Imported where it is used: a forked worker must not inherit DALI's threads."""
    import cv2

    from dataloader_svc import decode, headers
    from shared.batch import Bucket

    cv2.setNumThreads(1)
    return decode.decode_smaller(jpeg, headers.image_facts(jpeg), Bucket(SIDE, SIDE))


DECODERS: dict[str, Decode] = {"pillow": pillow, "reduced": reduced}


class Prepare:
    """A sample's bytes to tensors; picklable, so that any loader can send it to its workers."""

    def __init__(self, decoder: str) -> None:
        self.decoder = decoder

    def __call__(self, sample: Sample) -> Prepared:
        return torch.from_numpy(DECODERS[self.decoder](sample[0])), tokens(sample[1])


def tokens(caption: bytes) -> torch.Tensor:
    """The caption's bytes as ids, cut and padded to TOKENS."""
    ids = torch.zeros(TOKENS, dtype=torch.int64)
    cut = caption[:TOKENS]
    ids[: len(cut)] = torch.frombuffer(bytearray(cut), dtype=torch.uint8)
    return ids


def collate(samples: Sequence[Prepared]) -> Prepared:
    """A batch of samples."""
    pixels, ids = zip(*samples, strict=True)
    return torch.stack(pixels), torch.stack(ids)


def one_thread() -> None:
    """Each loader's parallelism is its workers'."""
    torch.set_num_threads(1)
