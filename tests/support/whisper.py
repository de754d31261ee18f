"""Whisper's log-mel recipe in plain numpy, written from its description, to compare ours with."""

import numpy as np
from numpy.typing import NDArray

N_FFT, HOP, MELS, RATE_HZ = 400, 160, 80, 16_000


def hz_of(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    """Slaney's scale: linear below 1 kHz (15 mel), then 27 mel for each factor of 6.4."""
    return np.where(mel < 15, mel * 200 / 3, 1000 * 6.4 ** ((mel - 15) / 27))


def filters() -> NDArray[np.float64]:
    """[MELS, N_FFT / 2 + 1] triangles, each of area 1 Hz."""
    top = 15 + 27 * np.log(RATE_HZ / 2 / 1000) / np.log(6.4)
    edges = hz_of(np.linspace(0, top, MELS + 2))
    bins = np.linspace(0, RATE_HZ / 2, N_FFT // 2 + 1)
    rows = []
    for low, peak, high in zip(edges, edges[1:], edges[2:], strict=False):
        rise, fall = (bins - low) / (peak - low), (high - bins) / (high - peak)
        rows.append(np.maximum(0, np.minimum(rise, fall)) * 2 / (high - low))
    return np.array(rows)


def log_mel(clip: NDArray[np.int16]) -> NDArray[np.float64]:
    """[MELS, samples / HOP] of one clip."""
    wave = np.pad(clip / 32768, N_FFT // 2, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(N_FFT) / N_FFT)
    frames = np.stack([wave[i : i + N_FFT] * window for i in range(0, len(wave) - N_FFT + 1, HOP)])
    power = np.abs(np.fft.rfft(frames)).T[:, :-1] ** 2
    log = np.log10(np.maximum(filters() @ power, 1e-10))
    return (np.maximum(log, log.max() - 8) + 4) / 4
