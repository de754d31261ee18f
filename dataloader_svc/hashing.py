"""Shuffles as sorts by a counter hash: the same for ever, whatever becomes of a library's generators."""

from typing import Any

import numpy as np
import numpy.typing as npt

from dataloader_svc.bucket import Array

WHOLE = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def mix64(*words: int | Array) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of the words, element by element: splitmix64's finaliser chained over them.

    Leading words that are ints cost no array. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014.
    """
    state: Any = 0
    for word in words:
        state = ((state ^ (word & WHOLE if isinstance(word, int) else word.astype(np.uint64))) + GAMMA) & WHOLE
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WHOLE
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WHOLE
        state = state ^ (state >> 31)
    return np.atleast_1d(np.asarray(state, np.uint64))


def shuffled(ids: Array, *words: int) -> Array:
    """`ids`, all different and none negative, in the order of their hashes.

    Hashes are sorted with ids in place of their lowest bits, several times as fast as an argsort; where what is left of
    them is equal, whole hashes decide.
    """
    id_bits = np.uint64(int(ids.max(initial=0)).bit_length())
    keys = (mix64(*words, ids) >> id_bits << id_bits) | ids.astype(np.uint64)
    keys.sort()
    order = (keys & ((np.uint64(1) << id_bits) - np.uint64(1))).astype(ids.dtype)
    keys >>= id_bits
    tied = np.flatnonzero(keys[1:] == keys[:-1])
    places = np.union1d(tied, tied + 1)
    order[places] = order[places][np.argsort(mix64(*words, order[places]))]
    return order
