"""Encoded bytes in, arrays of one static shape out: the only door to DALI.

Images become `[height, width, 3]` uint8 RGB of a bucket: EXIF applied, the largest centred region of the bucket's
aspect ratio resized to it. Audio becomes int16 `[samples]` at the common rate. A bad sample is a returned SampleError
and costs only itself.

On a CPU every image is decoded alone in a thread: a batched decode dies with its worst member, and some headers crash
it. A JPEG goes to libjpeg-turbo, reduced where it is much larger than its bucket (`jpeg.py`), all else to DALI's
dynamic mode. On a GPU a micro-batch is one pipeline run; when that fails, its samples are decoded on the CPU.
"""

import ctypes
import io
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import lru_cache
from typing import Any

import cv2
import numpy as np
import soundfile
from numpy.typing import NDArray
from nvidia.dali import Pipeline, fn, types

from dataloader_svc import headers, jpeg, native
from dataloader_svc.lent import DeviceRow, Row
from shared.batch import Bucket
from shared.errors import ConfigError, SampleError
from shared.sections import DataSection, LoaderSection
from shared.telemetry import RateLimited, logger

_torch = sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
from nvidia.dali.experimental import dynamic  # noqa: E402  DALI would import torch for a type: 2 s a worker

if _torch is None:
    del sys.modules["torch"]

Pixels = NDArray[np.uint8]
Region = tuple[int, int, int, int]

# OpenCV's bilinear filter takes a seventh of its area filter's time. Until here it is as near to an antialiased resize.
BY_AREA_FROM = 1.5

RATES_HZ = (1_000, 768_000)
STOPBAND_DB = 96.0
ZERO_CROSSINGS = 40
LARGEST_FACTOR = 4_000


class Decoder:
    """Decodes for one worker, on `loader.threads` threads (and one GPU when `loader.device` is `gpu`).

    `said` reports what native decoders printed since it was last asked; without it a JPEG that libjpeg only warns of
    passes.
    """

    def __init__(self, data: DataSection, loader: LoaderSection, said: native.Said = native.nothing) -> None:
        self._data, self._loader, self._said = data, loader, said
        self._threads = ThreadPoolExecutor(loader.threads, thread_name_prefix="decode")
        self._batches = PipelineDecoder(loader.gpu_id, loader.threads) if loader.device == "gpu" else None
        cv2.setNumThreads(1)

    def decode_images(self, blobs: Sequence[bytes], bucket: Bucket, stay: bool = False) -> list[Row | SampleError]:
        """One `[bucket.height, bucket.width, 3]` array or the verdict against it, for each of `blobs`.

        With `stay`, pictures that the GPU decodes are not copied to the host.
        """
        verdicts: dict[int, Row | SampleError] = {}
        sizes: dict[int, tuple[int, int]] = {}
        for place, blob in enumerate(blobs):
            try:
                sizes[place] = headers.image_size(blob, self._data.image)
            except SampleError as error:
                verdicts[place] = error
        good = list(sizes)
        decoded = self._decode([blobs[place] for place in good], list(sizes.values()), bucket, stay)
        verdicts.update(zip(good, decoded, strict=True))
        return [verdicts[place] for place in range(len(blobs))]

    def decode_audio(self, blob: bytes, max_samples: int) -> NDArray[np.int16] | SampleError:
        """Mono int16 at `data.audio.rate_hz`, cut at `max_samples` samples, or the verdict against the clip."""
        try:
            return to_clip(blob, self._data.audio.rate_hz, max_samples)
        except SampleError as error:
            return error

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _decode(
        self, blobs: list[bytes], sizes: list[tuple[int, int]], bucket: Bucket, stay: bool
    ) -> Sequence[Row | SampleError]:
        if self._batches and blobs:
            done = self._batches.decode(blobs, sizes, bucket, stay)
            if done is not None:
                return done
        decode = decode_smaller if self._loader.jpeg == "reduced" else decode_one
        self._said()
        found = list(self._threads.map(decode, blobs, sizes, [bucket] * len(blobs)))
        return self._judged(found, blobs, sizes, bucket) if jpeg.damage(self._said()) else found

    def _judged(
        self, found: list[Pixels | SampleError], blobs: list[bytes], sizes: list[tuple[int, int]], bucket: Bucket
    ) -> list[Pixels | SampleError]:
        """libjpeg warned of damage in one of these pictures: each is decoded again alone, which tells whose it is."""
        for place, blob in enumerate(blobs):
            if headers.is_jpeg(blob) and not isinstance(found[place], SampleError):
                decode_one(blob, sizes[place], bucket)
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


def fit(pixels: Pixels, bucket: Bucket, by_area_from: float = 1.0) -> Pixels:
    """Cut `[H, W, 3]` pixels to the bucket's aspect ratio and resize: by area when both sides shrink by
    `by_area_from` or more, else bilinear.
    """
    top, left, bottom, right = region((pixels.shape[0], pixels.shape[1]), bucket)
    part = pixels[top:bottom, left:right]
    shrinks = min(part.shape[0] / bucket.height, part.shape[1] / bucket.width)
    how = cv2.INTER_AREA if shrinks >= by_area_from else cv2.INTER_LINEAR
    resized: Pixels = cv2.resize(part, (bucket.width, bucket.height), interpolation=how)
    return resized


def decode_smaller(blob: bytes, size: tuple[int, int], bucket: Bucket) -> Pixels | SampleError:
    """`decode_one`, but a JPEG is decoded by libjpeg-turbo, and no larger than its bucket needs."""
    if not headers.is_jpeg(blob):
        return decode_one(blob, size, bucket)
    top, left, bottom, right = region(size, bucket)
    factor = jpeg.reduction((bottom - top, right - left), (bucket.height, bucket.width))
    orientation = headers.orientation(blob)
    turned = orientation in headers.TURNED
    try:
        reduced = jpeg.decode_reduced(blob, factor)
    except SampleError as error:
        return error
    if reduced is None:
        return decode_one(blob, size, bucket)
    stored = (size[1], size[0]) if turned else size
    if reduced.shape[:2] != (-(-stored[0] // factor), -(-stored[1] // factor)):
        return _mismatch(reduced.shape, size)
    fitted = fit(reduced, Bucket(bucket.width, bucket.height) if turned else bucket, BY_AREA_FROM)
    return jpeg.orient(fitted, orientation)


def decode_one(blob: bytes, size: tuple[int, int], bucket: Bucket) -> Pixels | SampleError:
    """Decode one image on the CPU; `size` is the (height, width) its header promises, EXIF applied."""
    try:
        tensor = dynamic.decoders.image(dynamic.as_tensor(np.frombuffer(blob, np.uint8)), device="cpu")
        pixels: Pixels = np.asarray(tensor.evaluate())
    except Exception as error:  # DALI raises RuntimeError, MemoryError and others for bad bytes
        return SampleError("image_decode", _last_line(error))
    if pixels.shape != (*size, 3):
        return _mismatch(pixels.shape, size)
    return fit(pixels, bucket)


def _mismatch(shape: Sequence[int], size: tuple[int, int]) -> SampleError:
    return SampleError("size_mismatch", f"decoded to {shape[0]}x{shape[1]}, its header says {size[0]}x{size[1]}")


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "rror" in line or "ailure" in line] or lines or [type(error).__name__]
    return told[0][:200]


class PipelineDecoder:
    """Whole micro-batches through one DALI pipeline: hardware JPEG and resize on GPU `gpu_id` (None: on the CPU)."""

    def __init__(self, gpu_id: int | None, threads: int) -> None:
        self._gpu_id, self._num_threads = gpu_id, threads
        self._pipeline: Any = None
        self._capacity = 0
        self._warn = RateLimited(logger("decode").warning)

    def decode(
        self, blobs: list[bytes], sizes: list[tuple[int, int]], bucket: Bucket, stay: bool = False
    ) -> Sequence[Row | SampleError] | None:
        """Pictures in the order of `blobs`, or None when the run failed and nothing is known of its members.

        `sizes` are the (height, width) the headers promise, EXIF applied. They are arrays, or `stay` on the GPU.
        """
        regions = np.array([region(size, bucket) for size in sizes], np.float32)
        try:
            pixels_NHWC, shapes = self._run(blobs, regions, bucket, stay and self._gpu_id is not None)
        except Exception as error:  # one bad member fails the run; the caller decodes each alone and names it
            self._warn("pipeline", f"a batch of {len(blobs)} is decoded on the CPU: {_last_line(error)}")
            self._pipeline = None
            return None
        pairs = zip(pixels_NHWC, shapes, sizes, strict=True)
        return [p if tuple(shape[:2]) == size else _mismatch(shape, size) for p, shape, size in pairs]

    def _run(
        self, blobs: list[bytes], regions: NDArray[np.float32], bucket: Bucket, stay: bool
    ) -> tuple[Sequence[Row], list[list[int]]]:
        pipeline = self._built(len(blobs))
        pipeline.feed_input("encoded", [np.frombuffer(blob, np.uint8) for blob in blobs])
        pipeline.feed_input("start", list(regions[:, :2]))
        pipeline.feed_input("end", list(regions[:, 2:]))
        pipeline.feed_input("size", [np.array([bucket.height, bucket.width], np.float32)] * len(blobs))
        pixels, shapes = pipeline.run()
        rows = _rows_there(pixels) if stay else list(np.array(pixels.as_cpu().as_tensor()))
        return rows, np.asarray(shapes.as_cpu().as_tensor()).tolist()

    def _built(self, size: int) -> Any:
        if self._pipeline is None or size > self._capacity:
            self._capacity = max(size, self._capacity)
            self._pipeline = _pipeline(self._capacity, self._num_threads, self._gpu_id)
        return self._pipeline


def _rows_there(pixels: Any) -> list[DeviceRow]:
    """The pictures of a pipeline's output on the GPU, which DALI does not use again for as long as it lives."""
    return [DeviceRow(int(pixels[place].data_ptr()), pixels) for place in range(len(pixels))]


def _pipeline(capacity: int, threads: int, gpu_id: int | None) -> Any:
    pipeline = Pipeline(batch_size=capacity, num_threads=threads, device_id=gpu_id, prefetch_queue_depth=1)
    with pipeline:
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
        start, end, size = (fn.external_source(name=n, dtype=types.FLOAT, ndim=1) for n in ("start", "end", "size"))
        where = "cpu" if gpu_id is None else "mixed"
        images = fn.decoders.image(encoded, device=where, output_type=types.RGB)
        linear = {"interp_type": types.INTERP_LINEAR, "antialias": True}
        resized = fn.resize(images, size=size, roi_start=start, roi_end=end, **linear)
        pipeline.set_outputs(resized, images.shape())
    pipeline.build()
    return pipeline


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


def count_gpus() -> int:
    """How many CUDA devices the driver shows; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def to_clip(blob: bytes, rate_hz: int, max_samples: int) -> NDArray[np.int16]:
    """Mono int16 at `rate_hz` from a wav, flac, ogg, opus or mp3 file: channels averaged, then resampled.

    Raises:
        SampleError: `audio_decode`, `empty_audio` or `audio_rate`.
    """
    wave, source_hz = _read_wave(blob, rate_hz, max_samples)
    clip = resample(wave.mean(axis=1), source_hz, rate_hz)[:max_samples]
    rounded: NDArray[np.int16] = np.rint(np.clip(clip, -1.0, 1.0) * 32767.0).astype(np.int16)
    return rounded


def _read_wave(blob: bytes, rate_hz: int, max_samples: int) -> tuple[NDArray[np.float32], int]:
    low, high = RATES_HZ
    try:
        with soundfile.SoundFile(io.BytesIO(blob)) as file:
            source_hz = int(file.samplerate)
            if not low <= source_hz <= high:
                raise SampleError("audio_rate", f"{source_hz} Hz is outside {low} to {high} Hz")
            needed = math.ceil(max_samples * source_hz / rate_hz) + 2 * ZERO_CROSSINGS * -(-source_hz // rate_hz)
            wave: NDArray[np.float32] = file.read(needed, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, RuntimeError, TypeError, ValueError) as error:
        raise SampleError("audio_decode", str(error)[:200]) from None
    if not len(wave):
        raise SampleError("empty_audio", "the decoder gives no frames")
    if not np.isfinite(wave).all():
        raise SampleError("audio_decode", "the decoder gives values that are not finite")
    return wave, source_hz


def resample(wave: NDArray[np.float32], source_hz: int, rate_hz: int) -> NDArray[np.float32]:
    """Band-limited resampling of `[samples]` to ceil(samples x rate_hz / source_hz) samples.

    Polyphase: output m is the inner product of the input around m x down / up with one phase of a windowed sinc
    (Vaidyanathan, "Multirate Systems and Filter Banks", section 4.3). Stopband: from the lower Nyquist frequency on,
    STOPBAND_DB down.
    """
    if source_hz == rate_hz:
        return wave
    ratio = Fraction(rate_hz, source_hz).limit_denominator(LARGEST_FACTOR)
    up, down = ratio.numerator, ratio.denominator
    phases = _phases(up, down)
    reach = phases.shape[1] // 2
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(wave, reach), 2 * reach + 1)
    out = np.empty(-(-len(wave) * up // down), np.float32)
    for first in range(min(up, len(out))):
        start, phase = divmod(first * down, up)
        part = out[first::up]
        part[:] = windows[start::down][: len(part)] @ phases[phase]
    return out


@lru_cache(maxsize=16)
def _phases(up: int, down: int) -> NDArray[np.float32]:
    """The low-pass filter at `up` x the source rate, as `[up, 2 reach + 1]` weights of the inputs around each output.

    A Kaiser-windowed sinc by Kaiser's design formulas (Oppenheim and Schafer, section 7.6).
    """
    factor = max(up, down)
    half = ZERO_CROSSINGS * factor
    transition = (STOPBAND_DB - 7.95) / (2.285 * math.pi * 2 * half)
    cutoff = 1 / factor - transition / 2
    taps = np.sinc(cutoff * np.arange(-half, half + 1)) * np.kaiser(2 * half + 1, 0.1102 * (STOPBAND_DB - 8.7))
    reach = -(-half // up)
    places = half + np.arange(up)[:, None] + up * np.arange(reach, -reach - 1, -1)[None, :]
    inside = (places >= 0) & (places < len(taps))
    weights = np.where(inside, taps[np.clip(places, 0, len(taps) - 1)], 0.0) * (up / taps.sum())
    return np.ascontiguousarray(weights, np.float32)
