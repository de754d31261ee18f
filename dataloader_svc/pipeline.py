"""Whole micro-batches through one DALI pipeline: hardware JPEG and resize on a GPU, pictures straight to their places.

What stays on the host is a list of addresses: bytes are read by DALI where they lie, and a run's pictures, one block of
device memory, go in one copy to the slot, or to memory that the reader lent, where their places follow each other.
Into page-locked slots (`device.py`) that runs at the bus's speed and takes no processor time, but for the wait.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import Pipeline, fn, types
from nvidia.dali.tensors import TensorCPU

from dataloader_svc.native import last_line
from dataloader_svc.rows import Place, Region, Size, address_of
from shared.batch import Bucket
from shared.cuda import Gpu
from shared.logs import RateLimited, logger

# Of JPEGs, to the hardware decoder. By default DALI gives a third to the processors and the GPU's kernels, which the
# trainer wants, and which third follows from the batch: a picture's bits would depend on what it is decoded beside.
HARDWARE_SHARE = 1.0

# Whether a run's results are waited for once, on a stream of ours, where threads sleep (`device.wait_asleep`). DALI
# waits for an event not made for sleeping, which by CUDA's manual spins, and then again for the copy. Off until it is
# measured on a GPU: tests/bench/loader_gpu/inside.py.
ON_OUR_STREAM = False


class PipelineDecoder:
    """For one thread at a time, on GPU `gpu_id` (None: the CPU's operators). The pipeline is made for runs of up to
    `capacity` pictures, and made anew when one is larger. With `gpu` results are waited for on its stream.
    """

    def __init__(self, gpu_id: int | None, threads: int, capacity: int, gpu: Gpu | None = None) -> None:
        self._gpu_id, self._num_threads, self._capacity, self._gpu = gpu_id, threads, capacity, gpu
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
            self._feed(blobs, np.array(regions, np.float32), bucket)
            pixels, shapes = self._run()
            self._deliver(pixels, places)
        except Exception as error:  # one bad member fails the run; the caller decodes each alone and names it
            self._warn("pipeline", f"a batch of {len(blobs)} is decoded on the CPU: {last_line(error)}")
            self._pipeline = None
            return None
        return [(height, width) for height, width, _ in np.asarray(shapes.as_cpu().as_tensor()).tolist()]

    def _feed(self, blobs: Sequence[bytes], regions: NDArray[np.float32], bucket: Bucket) -> None:
        if self._pipeline is None or len(blobs) > self._capacity:
            self._capacity = max(self._capacity, len(blobs))
            self._pipeline = _pipeline(self._capacity, self._num_threads, self._gpu_id)
        self._pipeline.feed_input("encoded", list(map(TensorCPU, blobs)))
        self._pipeline.feed_input("start", np.ascontiguousarray(regions[:, :2]))
        self._pipeline.feed_input("end", np.ascontiguousarray(regions[:, 2:]))
        self._pipeline.feed_input("size", np.full((len(blobs), 2), (bucket.height, bucket.width), np.float32))

    def _run(self) -> tuple[Any, Any]:
        """DALI TensorLists: the pictures where they are made, with `gpu` in the order of its stream, and their shapes
        before the resize.
        """
        pixels, shapes = self._pipeline.run(self._gpu.stream if self._gpu else None)
        return pixels, shapes

    def _deliver(self, pixels: Any, places: Sequence[Place]) -> None:
        """Copy the pictures to their places, and wait until they are there."""
        deliver(
            pixels,
            places,
            {"cuda_stream": ctypes.c_void_p(self._gpu.stream), "non_blocking": True} if self._gpu else {},
        )
        if self._gpu:
            self._gpu.finish()


def deliver(pixels: Any, places: Sequence[Place], how: dict[str, Any]) -> None:
    """Copy a run's pictures, wherever they are, to their places, as `copy_to_external` is told by `how`.

    Raises:
        ValueError: the pictures do not have the shape of their places.
    """
    if (found := list(map(tuple, pixels.shape()))) != (wanted := [place.shape for place in places]):
        raise ValueError(f"pictures of {set(found)} came where {len(wanted)} of {set(wanted)} were due")
    addresses, size = [address_of(place) for place in places], math.prod(places[0].shape)
    if addresses == [addresses[0] + number * size for number in range(len(places))]:
        pixels.copy_to_external(ctypes.c_void_p(addresses[0]), **how)
        return
    for number, address in enumerate(addresses):
        pixels[number].copy_to_external(ctypes.c_void_p(address), **how)


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
