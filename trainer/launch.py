"""This process among the others: environment, device, process group and the few collectives the loop needs.

`join` comes before anything imports DeepSpeed, which reads its environment at import. Nothing here pickles: what
ranks exchange are integers in tensors. Every collective is bounded by its process group's timeout, which exceeds
`train.wait_s` and `train.checkpoint.write_s`, so a rank that gives up on its loader or its disk is named before the
others give up on it.
"""

import logging
import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from shared import mps
from shared.errors import ConfigError
from shared.mesh import Coords, Mesh, mesh_of
from shared.sections import RunConfig
from trainer.determinism import use_deterministic_algorithms

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


class Ranks:
    """The mesh, this rank's place in it, and collectives over all ranks."""

    def __init__(self, mesh: Mesh, rank: int, device: torch.device) -> None:
        self.mesh, self.rank, self.device = mesh, rank, device
        self.coords: Coords = mesh.coords(rank)
        readers = [mesh.readers(data) for data in range(mesh.data)]
        self._reader_groups = [dist.new_group(list(ranks)) for ranks in readers]
        self.readers = readers[self.coords.data]

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for the run: rank 0, which is also reader 0 of data coordinate 0."""
        return self.rank == 0

    @property
    def is_reader(self) -> bool:
        """Whether this rank reads batches: it is on the first or the last pipeline stage."""
        return self.rank in self.readers

    @property
    def reader(self) -> int:
        """Place among the readers of this data coordinate."""
        return self.readers.index(self.rank)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self._reduce([int(flag)], dist.ReduceOp.MAX)[0])

    def sum(self, values: Sequence[int]) -> list[int]:
        """Integers summed over all ranks, place by place (modulo 2^64)."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def from_main(self, value: int) -> int:
        """The main rank's integer."""
        return self._reduce([value if self.is_main else 0], dist.ReduceOp.SUM)[0]

    def among_readers(self, values: Sequence[int]) -> list[list[int]]:
        """Each reader's integers, for the readers of this data coordinate; call it on readers only."""
        mine = torch.tensor(values, dtype=torch.int64, device=self.device)
        found = [torch.empty_like(mine) for _ in self.readers]
        dist.all_gather(found, mine, group=self._reader_groups[self.coords.data])
        return [each.tolist() for each in found]

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in order of rank."""
        size = self._reduce([len(data)], dist.ReduceOp.MAX)[0]
        framed = len(data).to_bytes(8, "little") + data.ljust(size, b"\0")
        mine = torch.frombuffer(bytearray(framed), dtype=torch.uint8).to(self.device)
        found = [torch.empty_like(mine) for _ in range(self.mesh.world)]
        dist.all_gather(found, mine)
        every = [each.cpu().numpy().tobytes() for each in found]
        return [each[8 : 8 + int.from_bytes(each[:8], "little")] for each in every]

    def barrier(self) -> None:
        """Wait for every rank."""
        self._reduce([0], dist.ReduceOp.SUM)

    def leave(self) -> None:
        """Take the process group down, all ranks together (alone it may abort under a late peer)."""
        self.barrier()
        dist.destroy_process_group()

    def _reduce(self, values: Sequence[int], operation: dist.ReduceOp.RedOpType) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, op=operation)
        found: list[int] = tensor.tolist()
        return found


def join(config: RunConfig) -> Ranks:
    """Enter the process group a launcher (deepspeed, torchrun) describes, or a group of one without a launcher.

    Raises:
        ConfigError: the device is not there, the mesh does not fit the number of processes, or they cannot meet.
    """
    _stand_alone()
    mps.join(config.loader)
    if config.train.deterministic:
        use_deterministic_algorithms()
    kind = device_kind(config.train.device)
    mesh = mesh_of(config.mesh, int(os.environ["WORLD_SIZE"]))
    os.environ["DS_ACCELERATOR"] = kind
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.WARNING)
    device = _device(kind, int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if kind == "cuda" else "gloo"
    longest_s = max(2 * config.train.wait_s, config.train.checkpoint.write_s)
    _meet(backend, longest_s + 60)
    torch.manual_seed(config.train.seed)
    return Ranks(mesh, dist.get_rank(), device)


def _meet(backend: str, timeout_s: float) -> None:
    """Enter the process group; two runs that a host's launchers give one port are told apart here.

    Groups made later have a timeout of torch's own unless told otherwise, and DeepSpeed tells nothing.
    """
    timeout = timedelta(seconds=timeout_s)
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        own = getattr(dist.distributed_c10d, name)
        setattr(dist.distributed_c10d, name, max(own or timeout, timeout))
    try:
        dist.init_process_group(backend, timeout=timeout)
    except dist.DistError as error:
        place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        rule = f"is no place for the ranks to meet ({str(error).splitlines()[0]})"
        remedy = "free it, or give the launcher another --master_port"
        raise ConfigError("MASTER_ADDR:MASTER_PORT", place, rule, remedy) from None


def device_kind(wanted: str) -> str:
    """`cuda` or `cpu`, from `train.device`.

    Raises:
        ConfigError: CUDA is asked for and absent.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        rule = "cannot be used: torch finds no CUDA device"
        raise ConfigError("train.device", wanted, rule, "set train.device=cpu or auto")
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


def _device(kind: str, local_rank: int) -> torch.device:
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    return torch.device("cpu")


def _stand_alone() -> None:
    if "WORLD_SIZE" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(ALONE, MASTER_PORT=str(free.getsockname()[1]))
