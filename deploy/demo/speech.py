"""Spoken sentences as WAV and FLAC files: several voices, two sample rates, mono and stereo."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt
import soundfile

from deploy.demo.espeak import EspeakError, Utterance, Waveform, synthesize
from shared.errors import ConfigError

Samples = npt.NDArray[np.int16]

VOICES = ("en", "en-us", "en-gb-scotland", "en-us+f3", "en-us+m3", "en+f2", "en-us+f4", "en-gb-x-rp+m1")
SPEEDS_WPM = (140, 160, 175, 195)
PITCHES = (35, 45, 55, 65)
STEREO_GAINS = ((1.0, 0.4), (0.5, 1.0), (0.9, 0.9))


@dataclass(frozen=True)
class Encoding:
    """How a recording is stored."""

    extension: str
    rate_hz: int
    channels: int = 1


@dataclass(frozen=True)
class Delivery:
    """Who says a sentence, how, and how it is stored."""

    voice: str
    speed_wpm: int
    pitch: int
    encoding: Encoding
    gains: tuple[float, ...]


@dataclass(frozen=True)
class Speech:
    """A sentence and its delivery."""

    text: str
    delivery: Delivery


@dataclass(frozen=True)
class Recording:
    """An encoded sentence."""

    extension: str
    data: bytes
    duration_s: float


ENCODINGS = (
    Encoding("wav", 22_050),
    Encoding("flac", 22_050),
    Encoding("wav", 16_000),
    Encoding("flac", 22_050),
    Encoding("wav", 22_050, channels=2),
    Encoding("flac", 16_000),
    Encoding("wav", 22_050),
    Encoding("flac", 22_050),
)


def plan_deliveries(rng: Random) -> Iterator[Delivery]:
    """An endless, varied and repeatable series of deliveries."""
    while True:
        for encoding in rng.sample(ENCODINGS, len(ENCODINGS)):
            gains = rng.choice(STEREO_GAINS) if encoding.channels == 2 else (1.0,)
            yield Delivery(rng.choice(VOICES), rng.choice(SPEEDS_WPM), rng.choice(PITCHES), encoding, gains)


def record(speeches: Sequence[Speech]) -> Iterator[Recording]:
    """Say and encode every sentence, in order."""
    deliveries = [speech.delivery for speech in speeches]
    utterances = [Utterance(s.text, s.delivery.voice, s.delivery.speed_wpm, s.delivery.pitch) for s in speeches]
    try:
        waveforms = synthesize(utterances) if utterances else []
    except EspeakError as error:
        rule = f"must speak all {len(utterances)} sentences ({error})"
        raise ConfigError("speech synthesiser", "espeak-ng", rule, "run: pip install espeakng-loader") from error
    return map(_encode, waveforms, deliveries)


def resample(samples: Samples, rate_hz: int, new_rate_hz: int) -> Samples:
    """`samples` at a lower rate, by cutting the spectrum: nothing folds back."""
    count = round(len(samples) * new_rate_hz / rate_hz)
    spectrum = np.fft.rfft(samples.astype(np.float64))[: count // 2 + 1]
    wave = np.fft.irfft(spectrum, count) * (count / len(samples))
    return _to_int16(wave)


def _encode(waveform: Waveform, delivery: Delivery) -> Recording:
    encoding = delivery.encoding
    samples: Samples = np.frombuffer(waveform.pcm, "<i2").astype(np.int16)
    if encoding.rate_hz != waveform.rate_hz:
        samples = resample(samples, waveform.rate_hz, encoding.rate_hz)
    channels = _to_int16(np.multiply.outer(samples, delivery.gains)) if encoding.channels > 1 else samples
    stream = io.BytesIO()
    soundfile.write(stream, channels, encoding.rate_hz, format=encoding.extension.upper(), subtype="PCM_16")
    return Recording(encoding.extension, stream.getvalue(), len(samples) / encoding.rate_hz)


def _to_int16(wave: npt.NDArray[np.float64]) -> Samples:
    return np.clip(np.rint(wave), -32768, 32767).astype(np.int16)
