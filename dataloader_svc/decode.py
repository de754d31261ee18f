"""Encoded bytes in, arrays of one static shape out.

Images become `[height, width, 3]` uint8 RGB of a bucket: EXIF applied, the largest centred region of the bucket's
aspect ratio resized to it, each written straight into its place. Audio becomes int16 `[samples]` at the common rate
(`clips.py`). A bad sample is a returned SampleError and costs only itself.

On a CPU every image is decoded alone in a thread: a batched decode dies with its worst member, and some headers crash
it. A JPEG goes to libjpeg-turbo, reduced where it is much larger than its bucket (`jpeg.py`), all else to DALI
(`dali.py`). On a GPU a micro-batch is one run of a pipeline (`pipeline.py`); when that fails, its samples are decoded
on the CPU. Both doors to DALI are opened when first needed, for that takes longer than all else at a start.
"""

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from numpy.typing import NDArray

from dataloader_svc import clips, headers, jpeg, native, scan
from dataloader_svc.crew import Crew
from dataloader_svc.headers import ImageFacts
from dataloader_svc.native import last_line
from dataloader_svc.rows import DevicePlace, Pixels, Place, Region, Size
from shared.batch import Bucket, groups
from shared.cuda import count_gpus
from shared.errors import ConfigError, DataError, SampleError
from shared.sections import DataSection, LoaderSection

if TYPE_CHECKING:
    from dataloader_svc.pipeline import PipelineDecoder

# OpenCV's bilinear filter takes a seventh of its area filter's time. Until here it is as near to an antialiased resize.
BY_AREA_FROM = 1.5

# What native decoders print goes to one file of the process: only one decoder may be at it while it is read.
LISTENING = threading.Lock()


class Decoder:
    """Decodes for one worker, on `loader.threads` threads (and one GPU when `loader.device` is `gpu`).

    `said` reports what native decoders printed since it was last asked; without it a JPEG that libjpeg only warns of
    passes.
    """

    def __init__(self, data: DataSection, loader: LoaderSection, said: native.Said = native.nothing) -> None:
        self._data, self._loader, self._said = data, loader, said
        self._crew = Crew(loader.threads, "decode")
        most = max(1, *(group.images for group in groups(data)))
        self._batches = _on_gpu(loader, most) if loader.device == "gpu" else None
        cv2.setNumThreads(1)

    def decode_images(
        self, blobs: Sequence[bytes], bucket: Bucket, places: Sequence[Place] | None = None
    ) -> list[Place | SampleError]:
        """One `[bucket.height, bucket.width, 3]` array or the verdict against it, for each of `blobs`.

        The arrays are those of `places`, C-contiguous and written over, or new ones. What a place holds after a
        verdict is undefined. Places may lie in the GPU's memory.

        Raises:
            DeviceError: they cannot be written there.
        """
        if places is None:
            places = list(np.empty((len(blobs), bucket.height, bucket.width, 3), np.uint8))
        verdicts: list[Any] = [self._facts(blob) for blob in blobs]
        good = [place for place, facts in enumerate(verdicts) if isinstance(facts, ImageFacts)]
        jobs = ([blobs[i] for i in good], [verdicts[i] for i in good], [places[i] for i in good])
        for place, outcome in zip(good, self._decode(*jobs, bucket), strict=True):
            verdicts[place] = outcome
        return verdicts

    def decode_audio(self, blob: bytes, max_samples: int) -> NDArray[np.int16] | SampleError:
        """Mono int16 at `data.audio.rate_hz`, cut at `max_samples` samples, or the verdict against the clip."""
        try:
            return clips.to_clip(blob, self._data.audio.rate_hz, max_samples)
        except SampleError as error:
            return error

    def close(self) -> None:
        """Stop the threads."""
        self._crew.close()

    def _facts(self, blob: bytes) -> ImageFacts | SampleError:
        try:
            facts = headers.image_facts(blob, self._data.image)
        except SampleError as error:
            return error
        unheard = scan.damage(blob) if self._batches and headers.is_jpeg(blob) else None
        return unheard or facts

    def _decode(
        self, blobs: list[bytes], facts: list[ImageFacts], places: list[Place], bucket: Bucket
    ) -> Sequence[Place | SampleError]:
        if self._batches and blobs:
            regions = [region(each.size, bucket) for each in facts]
            done = self._batches.decode(blobs, regions, bucket, places)
            if done is not None:
                return [_as_promised(*each) for each in zip(places, done, facts, strict=True)]
        decode = decode_smaller if self._loader.jpeg == "reduced" else decode_one
        direct = [place if isinstance(place, np.ndarray) else None for place in places]
        with LISTENING:
            self._said()
            found = self._crew.map(decode, blobs, facts, [bucket] * len(blobs), direct)
            judged = self._judged(found, blobs, facts, bucket) if jpeg.damage(self._said()) else found
        return [_placed(*each) for each in zip(judged, places, strict=True)]

    def _judged(
        self, found: list[Pixels | SampleError], blobs: list[bytes], facts: list[ImageFacts], bucket: Bucket
    ) -> list[Pixels | SampleError]:
        """libjpeg warned of damage in one of these pictures: each is decoded again alone, which tells whose it is."""
        for place, blob in enumerate(blobs):
            if headers.is_jpeg(blob) and not isinstance(found[place], SampleError):
                decode_one(blob, facts[place], bucket)
                found[place] = jpeg.damage(self._said()) or found[place]
        return found


def region(size: tuple[int, int], bucket: Bucket) -> Region:
    """Rows and columns `(top, left, bottom, right)` of the largest centred region with the bucket's aspect ratio."""
    height, width = size
    scale = max(bucket.height / height, bucket.width / width)
    rows = min(height, max(1, round(bucket.height / scale)))
    columns = min(width, max(1, round(bucket.width / scale)))
    top, left = (height - rows) // 2, (width - columns) // 2
    return top, left, top + rows, left + columns


def fit(pixels: Pixels, bucket: Bucket, by_area_from: float = 1.0, place: Pixels | None = None) -> Pixels:
    """Cut `[H, W, 3]` pixels to the bucket's aspect ratio and resize: by area when both sides shrink by
    `by_area_from` or more, else bilinear. Written to `place`, of the bucket's shape, or a new array.
    """
    top, left, bottom, right = region((pixels.shape[0], pixels.shape[1]), bucket)
    part = pixels[top:bottom, left:right]
    shrinks = min(part.shape[0] / bucket.height, part.shape[1] / bucket.width)
    how = cv2.INTER_AREA if shrinks >= by_area_from else cv2.INTER_LINEAR
    resized: Pixels = cv2.resize(part, (bucket.width, bucket.height), dst=place, interpolation=how)
    return resized


def decode_smaller(blob: bytes, facts: ImageFacts, bucket: Bucket, place: Pixels | None = None) -> Pixels | SampleError:
    """`decode_one`, but a JPEG is decoded by libjpeg-turbo, and no larger than its bucket needs."""
    if not headers.is_jpeg(blob):
        return decode_one(blob, facts, bucket, place)
    top, left, bottom, right = region(facts.size, bucket)
    factor = jpeg.reduction((bottom - top, right - left), (bucket.height, bucket.width))
    try:
        reduced = jpeg.decode_reduced(blob, factor)
    except SampleError as error:
        return error
    if reduced is None:
        return decode_one(blob, facts, bucket, place)
    height, width = facts.stored
    if reduced.shape[:2] != (-(-height // factor), -(-width // factor)):
        return _mismatch(reduced.shape, facts.size)
    if facts.orientation == headers.UPRIGHT:
        return fit(reduced, bucket, BY_AREA_FROM, place)
    stored = Bucket(bucket.width, bucket.height) if facts.turned else bucket
    upright = jpeg.orient(fit(reduced, stored, BY_AREA_FROM), facts.orientation)
    if place is not None:
        place[:] = upright
    return upright if place is None else place


def decode_one(blob: bytes, facts: ImageFacts, bucket: Bucket, place: Pixels | None = None) -> Pixels | SampleError:
    """Decode one image on the CPU, to `place` or a new array; `facts` are what its header promises.

    Raises:
        DataError: DALI cannot be loaded.
    """
    decode = _by_dali()
    try:
        pixels = decode(blob)
    except Exception as error:  # DALI raises RuntimeError, MemoryError and others for bad bytes
        return SampleError("image_decode", last_line(error))
    if pixels.shape != (*facts.size, 3):
        return _mismatch(pixels.shape, facts.size)
    return fit(pixels, bucket, place=place)


@cache
def _by_dali() -> Callable[[bytes], Pixels]:
    try:
        from dataloader_svc import dali
    except ImportError as error:
        raise DataError(f"nvidia.dali cannot be loaded ({error}); install millstream anew") from None
    return dali.decode


def _on_gpu(loader: LoaderSection, capacity: int) -> "PipelineDecoder":
    from dataloader_svc.pipeline import PipelineDecoder

    return PipelineDecoder(loader.gpu_id, loader.threads, capacity)


def _placed(outcome: Pixels | SampleError, place: Place) -> Place | SampleError:
    """The pixels in their place."""
    if outcome is place or isinstance(outcome, SampleError):
        return outcome
    if isinstance(place, DevicePlace):
        place.put(outcome)
    else:
        place[:] = outcome
    return place


def _as_promised(place: Place, size: Size, facts: ImageFacts) -> Place | SampleError:
    return place if size == facts.size else _mismatch(size, facts.size)


def _mismatch(shape: Sequence[int], size: tuple[int, int]) -> SampleError:
    return SampleError("size_mismatch", f"decoded to {shape[0]}x{shape[1]}, its header says {size[0]}x{size[1]}")


def check_device(loader: LoaderSection) -> None:
    """Refuse `loader.device: gpu` where there is no such GPU.

    Raises:
        ConfigError: no driver, or fewer devices than `loader.gpu_id` needs.
    """
    if loader.device != "gpu":
        return
    found = count_gpus()
    remedy = "set loader.device: cpu, or run where nvidia-smi lists the device"
    if not found:
        raise ConfigError("loader.device", "gpu", "needs an NVIDIA driver and a GPU, and none is found", remedy)
    if not 0 <= loader.gpu_id < found:
        raise ConfigError("loader.gpu_id", loader.gpu_id, f"must be below the {found} GPUs found", remedy)
