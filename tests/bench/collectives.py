"""NCCL (gloo without GPUs) by size: `torchrun --nproc_per_node N -m tests.bench.collectives OUT.md`.

Bus bandwidth as nccl-tests defines it: bytes / time, x 2 (n - 1) / n for all-reduce, x (n - 1) / n for all-to-all.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from tests.bench.report import table

REPEATS, WARM = 20, 5


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Mean time of one call."""
    for _ in range(WARM):
        call()
    wait(device)
    began = time.perf_counter()
    for _ in range(REPEATS):
        call()
    wait(device)
    return (time.perf_counter() - began) / REPEATS


def wait(device: torch.device) -> None:
    """Until everything that was asked for is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def main() -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", **({"device_id": device} if cuda else {}))  # type: ignore[arg-type]
    world, rows = dist.get_world_size(), []
    for power in range(12, 31 if cuda else 24, 2):
        data = torch.ones(2**power // 2, dtype=torch.bfloat16, device=device)
        out = torch.empty_like(data)
        reduce_s = seconds(lambda data=data: dist.all_reduce(data), device)  # type: ignore[misc]
        exchange_s = seconds(lambda data=data, out=out: dist.all_to_all_single(out, data), device)  # type: ignore[misc]
        share = (world - 1) / world
        rows.append(
            {
                "bytes": f"{2**power:,}",
                "all-reduce µs": f"{1e6 * reduce_s:,.0f}",
                "bus GB/s": f"{2**power * 2 * share / reduce_s / 1e9:.1f}",
                "all-to-all µs": f"{1e6 * exchange_s:,.0f}",
                "bus GB/s ": f"{2**power * share / exchange_s / 1e9:.1f}",
            }
        )
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text("\n".join([f"{world} ranks, bf16, {dist.get_backend()}", "", *table(rows), ""]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
