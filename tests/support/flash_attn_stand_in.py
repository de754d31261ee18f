"""A `flash_attn` for machines without a GPU: a package on the path with the two functions that flash-attn 2 documents.

Signatures and meaning are those of its README (2.8); what it asks of callers is asserted. Both are differentiable.
"""

import importlib
import sys
from pathlib import Path

import pytest

FLASH2, CUTE = "flash_attn_interface", "cute"
"""Modules of the package: flash-attn 2's, and flash-attn-4's, of which there is the name alone."""

SCRIPT = '''
import torch


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """q [B, L, H, D]; k and v [B, L, G, D]."""
    assert q.ndim == k.ndim == v.ndim == 4 and dropout_p == 0.0
    return torch.stack([_one(*each, causal) for each in zip(q, k, v)])


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):
    """q [places, H, D]; k and v [places, G, D]; bounds are int32, from 0 to the number of places."""
    assert q.ndim == k.ndim == v.ndim == 3 and dropout_p == 0.0
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
    bounds = cu_seqlens_q.tolist()
    assert bounds[0] == 0 and bounds[-1] == len(q)
    lengths = [stop - start for start, stop in zip(bounds, bounds[1:])]
    assert isinstance(max_seqlen_q, int) and max(lengths) <= max_seqlen_q == max_seqlen_k
    return torch.cat([_one(*each, causal) for each in zip(q.split(lengths), k.split(lengths), v.split(lengths))])


def _one(q, k, v, causal):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("lhd,shd->hls", q, k) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hls,shd->lhd", scores.softmax(-1), v)
'''


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Put a `flash_attn` of these modules, and no other, before everything on the path until the test ends."""
    package = folder / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text(f"from flash_attn.{FLASH2} import *\n" if FLASH2 in modules else "")
    for module in modules:
        (package / f"{module}.py").write_text(SCRIPT if module == FLASH2 else "")
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(folder))
    for name in ("flash_attn", *(f"flash_attn.{module}" for module in modules)):
        found = importlib.import_module(name)
        del sys.modules[name]
        monkeypatch.setitem(sys.modules, name, found)
