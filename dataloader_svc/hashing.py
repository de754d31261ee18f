"""Shuffles as argsorts of a counter hash: the same for ever, whatever becomes of a library's generators."""

import numpy as np
import numpy.typing as npt

from dataloader_svc.bucket import Array


def mix64(*words: int | Array) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of the words, element by element: splitmix64's finaliser chained over them.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    with np.errstate(over="ignore"):
        state = np.zeros(1, np.uint64)
        for word in words:
            value = np.uint64(word & (2**64 - 1)) if isinstance(word, int) else word.astype(np.uint64)
            state = (state ^ value) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
        return state


def shuffled(ids: Array, *words: int) -> Array:
    """`ids` in the order of their hashes."""
    order: Array = ids[np.argsort(mix64(*words, ids), kind="stable")]
    return order
