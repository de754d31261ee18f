"""What daemon and decode workers say to each other, over a Unix socket pair: one msgpack struct a packet.

`Setup` is too large for a packet and travels in a memory file. All other messages are far below one.
"""

import msgspec

from dataloader_svc.shards import Shard
from shared.sections import DataSection, LoaderSection

PACKET_BYTES = 1 << 17
HANDS_WITH_GPU = 2


class Setup(msgspec.Struct, frozen=True):
    """Daemon -> worker, at its start: what to decode, and how."""

    data: DataSection
    loader: LoaderSection
    shards: tuple[Shard, ...]
    index_dir: str | None


def hands(loader: LoaderSection) -> int:
    """How many tasks a worker does at a time: on a GPU one is read and laid out while another is decoded."""
    return HANDS_WITH_GPU if loader.device == "gpu" else 1


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Daemon -> worker, once: the index is there, and this is the segment of slots to fill."""

    segment: str
    slots: int
    slot_bytes: int


class Target(msgspec.Struct, frozen=True, array_like=True):
    """Where in a reader's device memory a batch's pixels go: `offset` bytes into what the IPC handle opens.

    `hashed`: the checksum covers them.
    """

    handle: bytes
    offset: int
    hashed: bool


class Task(msgspec.Struct, frozen=True, tag=True):
    """Daemon -> worker: fill `slot` with a micro-batch, its pixels elsewhere if there is a `target`.

    `skip` are samples known to kill a decoder. `careful`: one sample at a time, each announced by a Progress.
    """

    id: int
    slot: int
    group: int
    sample_ids: tuple[int, ...]
    spares: tuple[int, ...]
    skip: tuple[int, ...] = ()
    careful: bool = False
    target: Target | None = None


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Daemon -> worker: unmap a reader's device memory, if it is mapped."""

    handle: bytes


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """Why one sample cannot be used."""

    sample_id: int
    reason: str
    detail: str


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """Seconds a worker spent on a task, by stage."""

    read: float
    decode: float
    assemble: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Worker -> daemon: warmed up, and it has begun.

    `device` is the UUID of the GPU it decodes on, or "", `device_bytes` what warming up took of its memory.
    """

    device: str = ""
    device_bytes: int = 0


class Forgotten(msgspec.Struct, frozen=True, tag=True):
    """Worker -> daemon: that memory is not mapped here."""

    handle: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Worker -> daemon: it cannot start, or (storage) not go on.

    `setting` is (name, value, rule, remedy), or empty when `text` tells all.
    """

    text: str
    setting: tuple[str, ...] = ()


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Worker -> daemon: this sample's decode begins (careful tasks only), or storage keeps its read waiting."""

    task: int
    sample_id: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """Worker -> daemon: the slot is filled. `counts` are samples, images, clips, tokens, label tokens.

    `retries` and `fetched_bytes` tell of remote storage: reads tried again, and bytes not found in the cache.
    `on_device`: the pixels are in the task's target, not in the slot.
    """

    task: int
    checksum: int
    counts: tuple[int, int, int, int, int]
    sample_ids: tuple[int, ...]
    substituted: int
    verdicts: tuple[Verdict, ...]
    timings: Timings
    read_bytes: int
    retries: int = 0
    fetched_bytes: int = 0
    on_device: bool = False


Order = Task | Forget
Report = Ready | Refused | Progress | Done | Forgotten
