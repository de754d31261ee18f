"""Model FLOPs of what a step trained on, and the share of the hardware's peak that they are (MFU).

Formula (Chowdhery et al. 2022, appendix B): a multiply-add is 2 FLOPs, backward costs twice the forward, so 6 for each
weight of a matrix product and each place it is applied to; attention costs 12 x width for each pair of places that
see each other. In cross-attention the text of samples with features counts, and these features as keys. Of a block with
experts, the router counts and the experts that a token is sent to, whether or not a
full one dropped it. Only real places count: padding, unused image and clip slots, recomputation, element-wise work, the
preprocessing and the embedding's lookup do not. MFU = FLOPs of the step / (step seconds x devices x peak).
"""

import math

import msgspec
import torch
from torch import Tensor, nn

from shared.model_sections import ModelSection
from shared.sections import DataSection
from trainer.preprocess import DeviceBatch

PEAK_TFLOPS = {
    "A100": 312.0,
    "L40S": 362.05,
    "H100": 989.4,
    "H100 PCIe": 756.0,
    "H200": 989.4,
    "GH200": 989.4,
    "B200": 2250.0,
}
"""Dense bf16 by the vendor's data sheets; of the names that a device's name holds, the longest counts."""


class Work(msgspec.Struct):
    """What some micro-batches held. Pairs are places that see each other: a fp64 scalar on the device each.

    `readers` are places of text in samples that have `features`.
    """

    tokens: int = 0
    patches: int = 0
    images: int = 0
    patch_pairs: int = 0
    causal_pairs: Tensor | float = 0.0
    clip_places: Tensor | float = 0.0
    clip_pairs: Tensor | float = 0.0
    features: Tensor | float = 0.0
    readers: Tensor | float = 0.0
    feature_pairs: Tensor | float = 0.0


class FlopCounter:
    """Adds up `Work` of micro-batches and turns it into FLOPs for one model."""

    def __init__(self, data: DataSection, model: ModelSection) -> None:
        self._data, self._model = data, model

    def add(self, work: Work, batch: DeviceBatch) -> None:
        """One more micro-batch. Queues a few scalar sums on the batch's device and waits for nothing."""
        tensors, counts = batch.tensors, batch.counts
        height, width = batch.grid_hw
        places = height * width + int(self._model.vision.class_token)
        bounds = tensors.cu_seqlens[: counts.samples + 1].long()
        lengths = bounds.diff().double()
        features = nn.functional.pad((tensors.features_T >= 0).cumsum(0), (1, 0))[bounds].diff().double()
        readers = (lengths - features) * (features > 0)
        clips = ((tensors.mel_lengths_M + 1) // 2).double()
        work.tokens += counts.tokens
        work.images += counts.images
        work.patches += counts.images * height * width
        work.patch_pairs += counts.images * places**2
        work.causal_pairs = work.causal_pairs + (lengths * (lengths + 1)).sum() / 2
        work.clip_places = work.clip_places + clips.sum()
        work.clip_pairs = work.clip_pairs + clips.square().sum()
        work.features = work.features + features.sum()
        work.readers = work.readers + readers.sum()
        work.feature_pairs = work.feature_pairs + (readers * features).sum()

    def flops(self, work: Work) -> float:
        """Forward and backward FLOPs; waits for the device."""
        return self._decoder(work) + self._cross(work) + self._vision(work) + self._audio(work)

    def _decoder(self, work: Work) -> float:
        model = self._model.decoder
        heads = model.heads * model.head_size
        mixing = 2 * model.dim * (heads + model.kv_heads * model.head_size)
        mixtures = len(model.expert_blocks)
        mixture = model.dim * (model.experts + 3 * model.experts_per_token * model.expert_size)
        mlps = (model.depth - mixtures) * 3 * model.dim * model.mlp + mixtures * mixture
        weights = model.depth * mixing + mlps + model.dim * model.vocab
        return 6.0 * weights * work.tokens + 12.0 * model.depth * heads * float(work.causal_pairs)

    def _cross(self, work: Work) -> float:
        model = self._model.decoder
        heads, keys = model.heads * model.head_size, model.kv_heads * model.head_size
        weights = (2 * model.dim * heads + 3 * model.dim * model.mlp) * float(work.readers)
        weights += 2 * model.dim * keys * float(work.features)
        return len(model.cross_blocks) * (6.0 * weights + 12.0 * heads * float(work.feature_pairs))

    def _vision(self, work: Work) -> float:
        model, image = self._model.vision, self._data.image
        places = work.patches + work.images * int(model.class_token)
        blocks = _encoder_weights(model.dim, model.mlp, model.depth) * places
        stem = 3 * image.patch**2 * model.dim * work.patches
        projector = self._projector(model.dim * image.merge**2) * work.patches / image.merge**2
        return 6.0 * (blocks + stem + projector) + 12.0 * model.depth * model.dim * work.patch_pairs

    def _audio(self, work: Work) -> float:
        model = self._model.audio
        places = float(work.clip_places)
        stack = self._data.audio.samples_per_token // (2 * model.hop)
        stem = 3 * model.mels * model.dim * 2 + 3 * model.dim**2
        weights = _encoder_weights(model.dim, model.mlp, model.depth) + stem
        projector = self._projector(model.dim * stack) * places / stack
        return 6.0 * (weights * places + projector) + 12.0 * model.depth * model.dim * float(work.clip_pairs)

    def _projector(self, wide: int) -> int:
        dim = self._model.decoder.dim
        return wide * dim + dim * dim


def peak_tflops(device: torch.device, asked: float) -> float | None:
    """The device's dense bf16 peak: what is asked for, or by its name; None where neither says."""
    if asked:
        return asked
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    fitting = [known for known in PEAK_TFLOPS if known in name]
    return PEAK_TFLOPS[max(fitting, key=len)] if fitting else None


def mfu(flops: float, seconds: float, devices: int, peak: float | None) -> float | None:
    """Model FLOPs utilisation, 0 to 1; None without a peak (TFLOP/s)."""
    if peak is None or not math.isfinite(seconds):
        return None
    return flops / (seconds * devices * peak * 1e12)


def _encoder_weights(dim: int, mlp: int, depth: int) -> int:
    return depth * (4 * dim * dim + 2 * dim * mlp)
