"""What the model sees of pixels and samples: patches and log-mel frames. Pure functions of tensors, on any device.

Shapes: N images, H x W pixels, h x w patches, p the side of a patch, P = 3 p² its values, M clips, S samples, F = S /
hop frames, m mel bins.
"""

import torch
from torch import Tensor

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Per-channel constants of CLIP (Radford et al. 2021), for pixels in 0..1."""
HALF = (0.5, 0.5, 0.5)
NORMALISATIONS = {"clip": (CLIP_MEAN, CLIP_STD), "half": (HALF, HALF)}
"""`model.vision.pixels` -> mean and deviation."""


class Patches:
    """Pixels normalised as `pixels` says and cut into squares of side `patch`."""

    def __init__(self, patch: int, device: torch.device, pixels: str = "clip") -> None:
        self._patch = patch
        self._mean, self._std = (torch.tensor(values, device=device) for values in NORMALISATIONS[pixels])

    def __call__(self, pixels_NHWC: Tensor) -> Tensor:
        """[N, h, w, P] float32 of uint8 pixels; P runs over (row, column, channel) of the patch."""
        n, height, width, channels = pixels_NHWC.shape
        p, h, w = self._patch, height // self._patch, width // self._patch
        x = (pixels_NHWC.float() / 255 - self._mean) / self._std
        return x.reshape(n, h, p, w, p, channels).transpose(2, 3).reshape(n, h, w, p * p * channels)


class LogMel:
    """Whisper's log-mel spectrogram (openai/whisper `audio.py`, log_mel_spectrogram), clip by clip."""

    def __init__(self, filters_fm: Tensor, n_fft: int, hop: int) -> None:
        self._filters_mf, self._n_fft, self._hop = filters_fm.T.contiguous(), n_fft, hop
        self._window = torch.hann_window(n_fft, device=filters_fm.device)

    def __call__(self, clips_MS: Tensor) -> Tensor:
        """[M, m, F] float32 of int16 samples. Silence gives finite values."""
        clips, samples = clips_MS.shape
        if not clips:
            return torch.zeros(0, len(self._filters_mf), samples // self._hop, device=clips_MS.device)
        wave_MS = clips_MS.float() / 32768
        spectrum = torch.stft(wave_MS, self._n_fft, self._hop, window=self._window, center=True, return_complex=True)
        power_MfF = spectrum[..., :-1].abs().square()
        log_MmF = (self._filters_mf @ power_MfF).clamp(min=1e-10).log10()
        return (torch.maximum(log_MmF, log_MmF.amax((1, 2), keepdim=True) - 8) + 4) / 4
