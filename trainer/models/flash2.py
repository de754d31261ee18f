"""flash-attn 2 (Dao 2023, arXiv 2307.08691), where it is installed: GPUs from Ampere on, in half precision."""

from torch import Tensor


def flash2(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, causal: bool, cu_seqlens: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v as [B, L, H, D], within the bounds of `cu_seqlens` where they are given.

    Bounds never lie further apart than L, since no segment reaches beyond its sequence; a kernel that is told more
    places than a segment has leaves the others out.
    """
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    mixed: Tensor
    if cu_seqlens is None:
        mixed = flash_attn_func(q_BLHD, k_BLGD, v_BLGD, causal=causal)
        return mixed
    q, k, v = (x.flatten(0, 1) for x in (q_BLHD, k_BLGD, v_BLGD))
    longest = q_BLHD.shape[1]
    mixed = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=causal)
    return mixed.view_as(q_BLHD)
