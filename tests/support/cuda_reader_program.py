"""A reader in the cuda lane, in a process of its own: `python -m tests.support.cuda_reader_program ENDPOINT BATCHES`.

It prints one JSON line: for each batch its checksum over everything and whether its pixels lay in device memory. With a
third argument, `stay`, it then keeps its last batch and sleeps until it is killed.
"""

import json
import sys
import time

import torch

from trainer.client import LoaderClient

LONGEST_S = 120


def main() -> None:
    endpoint, batches, *stay = sys.argv[1:]
    block = torch.ones(1 << 20, device="cuda")
    with LoaderClient(endpoint, lane="cuda", verify=True, wait_s=60) as client:
        seen = [
            (batch.checksum, batch.pixels is not None) for batch, _ in zip(client, range(int(batches)), strict=False)
        ]
        backend = torch.cuda.memory.get_allocator_backend()
        sys.stdout.write(json.dumps({"seen": seen, "backend": backend, "sum": int(block.sum())}) + "\n")
        sys.stdout.flush()
        if stay:
            time.sleep(LONGEST_S)


if __name__ == "__main__":
    main()
