"""Encoded audio in, mono int16 `[samples]` at the common rate out.

Channels are averaged, then resampled by a polyphase filter of our own: libsndfile reads, and does nothing else.
"""

import io
import math
from fractions import Fraction
from functools import lru_cache

import numpy as np
import soundfile
from numpy.typing import NDArray

from dataloader_svc.headers import told
from shared.errors import SampleError

RATES_HZ = (1_000, 768_000)
STOPBAND_DB = 96.0
ZERO_CROSSINGS = 40
LARGEST_FACTOR = 4_000


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
        raise SampleError("audio_decode", told(error)[:200]) from None
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
