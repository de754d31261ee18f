"""Made-up facts for planning, without a shard behind them."""

import numpy as np

from dataloader_svc.bucket import Columns

SIZES = ((128, 128), (108, 144), (144, 108), (108, 192), (192, 108), (100, 200))


def columns(samples: int, seed: int = 0, bad_share: float = 0.0) -> Columns:
    """Mixed samples: with images of six shapes, clips to 4 s, both, or text alone; captions to 20 tokens."""
    rng = np.random.default_rng(seed)
    sides = np.array(SIZES)[rng.integers(0, len(SIZES), samples)]
    image, audio = rng.random(samples) < 0.6, rng.random(samples) < 0.4
    return Columns(
        (sides[:, 0] * image).astype(np.uint32),
        (sides[:, 1] * image).astype(np.uint32),
        rng.integers(1, 64_000, samples) * audio,
        rng.integers(0, 21, samples).astype(np.uint32),
        (rng.random(samples) < bad_share).astype(np.uint8),
    )


def pictures(*shapes: tuple[int, int]) -> Columns:
    """One good sample for each (height, width), with a caption of four tokens and no clip."""
    sides = np.array(shapes, np.uint32)
    zero = np.zeros(len(shapes), np.int64)
    return Columns(sides[:, 0], sides[:, 1], zero, np.full(len(shapes), 4, np.uint32), zero.astype(np.uint8))
