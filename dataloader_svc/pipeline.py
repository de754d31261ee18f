"""Whole micro-batches through one DALI pipeline: hardware JPEG and resize on a GPU, pictures straight to their places.

What stays on the host is a list of addresses: bytes are read by DALI where they lie, and a run's pictures, one block of
device memory, go in one copy to the slot, or to memory that the reader lent, where their places follow each other.
Into page-locked slots (`device.py`) that runs at the bus's speed and takes no processor time.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import Pipeline, fn, types

from dataloader_svc.native import last_line
from dataloader_svc.rows import Place, Region, Size, address_of
from shared.batch import Bucket
from shared.logs import RateLimited, logger

# Of JPEGs, to the hardware decoder. By default DALI gives a third to the processors and the GPU's kernels, which the
# trainer wants, and which third follows from the batch: a picture's bits would depend on what it is decoded beside.
HARDWARE_SHARE = 1.0


class PipelineDecoder:
    """For one thread at a time, on GPU `gpu_id` (None: the CPU's operators). The pipeline is made for runs of up to
    `capacity` pictures, and made anew when one is larger.
    """

    def __init__(self, gpu_id: int | None, threads: int, capacity: int) -> None:
        self._gpu_id, self._num_threads, self._capacity = gpu_id, threads, capacity
        self._pipeline: Any = None
        self._warn = RateLimited(logger("decode").warning)

    def decode(
        self, blobs: Sequence[bytes], regions: Sequence[Region], bucket: Bucket, places: Sequence[Place]
    ) -> list[Size] | None:
        """Write `regions` (top, left, bottom, right; EXIF applied) of the pictures, resized to the bucket, to `places`.

        `places` are C-contiguous `[bucket.height, bucket.width, 3]`, or lie on the GPU. Returns the (height, width)
        that each picture was decoded to before its resize, or None when the run failed and nothing is known of its
        members.
        """
        try:
            pixels, shapes = self._run(blobs, np.array(regions, np.float32), bucket)
            deliver(pixels, places)
        except Exception as error:  # one bad member fails the run; the caller decodes each alone and names it
            self._warn("pipeline", f"a batch of {len(blobs)} is decoded on the CPU: {last_line(error)}")
            self._pipeline = None
            return None
        return [(height, width) for height, width, _ in shapes]

    def _run(self, blobs: Sequence[bytes], regions: NDArray[np.float32], bucket: Bucket) -> tuple[Any, list[list[int]]]:
        """The pictures where they were made, as a DALI TensorList, and their shapes before the resize."""
        if self._pipeline is None or len(blobs) > self._capacity:
            self._capacity = max(self._capacity, len(blobs))
            self._pipeline = _pipeline(self._capacity, self._num_threads, self._gpu_id)
        self._pipeline.feed_input("encoded", [np.frombuffer(blob, np.uint8) for blob in blobs])
        self._pipeline.feed_input("start", np.ascontiguousarray(regions[:, :2]))
        self._pipeline.feed_input("end", np.ascontiguousarray(regions[:, 2:]))
        self._pipeline.feed_input("size", np.full((len(blobs), 2), (bucket.height, bucket.width), np.float32))
        pixels, shapes = self._pipeline.run()
        return pixels, np.asarray(shapes.as_cpu().as_tensor()).tolist()


def deliver(pixels: Any, places: Sequence[Place]) -> None:
    """Copy a run's pictures, wherever they are, to their places, and wait until they are there.

    Raises:
        ValueError: the pictures do not have the shape of their places.
    """
    if (found := list(map(tuple, pixels.shape()))) != (wanted := [place.shape for place in places]):
        raise ValueError(f"pictures of {set(found)} came where {len(wanted)} of {set(wanted)} were due")
    addresses, size = [address_of(place) for place in places], math.prod(places[0].shape)
    if addresses == [addresses[0] + number * size for number in range(len(places))]:
        pixels.copy_to_external(ctypes.c_void_p(addresses[0]))
        return
    for number, address in enumerate(addresses):
        pixels[number].copy_to_external(ctypes.c_void_p(address))


def _pipeline(capacity: int, threads: int, gpu_id: int | None) -> Any:
    """`encoded` is read where it lies: whoever feeds it keeps it until the run is over."""
    pipeline = Pipeline(batch_size=capacity, num_threads=threads, device_id=gpu_id, prefetch_queue_depth=1)
    with pipeline:
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1, no_copy=True)
        start, end, size = (fn.external_source(name=n, dtype=types.FLOAT, ndim=1) for n in ("start", "end", "size"))
        where = "cpu" if gpu_id is None else "mixed"
        images = fn.decoders.image(encoded, device=where, output_type=types.RGB, hw_decoder_load=HARDWARE_SHARE)
        linear = {"interp_type": types.INTERP_LINEAR, "antialias": True}
        resized = fn.resize(images, size=size, roi_start=start, roi_end=end, **linear)
        pipeline.set_outputs(resized, images.shape())
    pipeline.build()
    return pipeline
