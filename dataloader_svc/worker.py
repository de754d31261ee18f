"""A decode worker process: `python -m dataloader_svc.worker SOCKET_FD SETUP_FD LOG_FD`. Started by pool.py only.

It reads its Setup from the memory file and warms up; at Begin it opens the index and the slots and says Ready; then it
answers each Task with a Done after filling its slot, on a GPU two at a time (`hands.py`). It may die at any time
without harm to the daemon. It ends when the socket does, and the kernel kills it when the daemon dies, so none outlives
a `kill -9` of its parent.
"""

import contextlib
import ctypes
import io
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path

import cv2
import msgspec
import numpy as np
import soundfile

from dataloader_svc import device, nvml
from dataloader_svc.decode import Decoder, check_device
from dataloader_svc.fill import Filler
from dataloader_svc.hands import Hands
from dataloader_svc.index import Index
from dataloader_svc.lent import LentParts
from dataloader_svc.native import Said, silence
from dataloader_svc.store import Reader, Store
from dataloader_svc.tasks import (
    PACKET_BYTES,
    Begin,
    Done,
    Forgotten,
    Order,
    Progress,
    Ready,
    Refused,
    Report,
    Setup,
    Task,
    hands,
)
from shared.batch import Bucket
from shared.cuda import Gpu, device_uuid
from shared.errors import ConfigError, DataError, DeviceError, MillstreamError, SampleError
from shared.logs import logger, setup_logging
from shared.slots import Segment

PR_SET_PDEATHSIG = 1
WARM_SIDE = 64
AUDIO_FORMS = ("WAV", "FLAC", "OGG", "MP3")

_begin: "msgspec.msgpack.Decoder[Begin]" = msgspec.msgpack.Decoder(Begin)
_order: "msgspec.msgpack.Decoder[Order]" = msgspec.msgpack.Decoder(Order)


def main() -> None:
    """Serve tasks until the daemon hangs up."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    _die_with_parent()
    with os.fdopen(int(sys.argv[2]), "rb") as file:
        file.seek(0)
        setup = msgspec.msgpack.decode(file.read(), type=Setup)
    said = silence(int(sys.argv[3]))
    setup_logging("loader-worker")
    with contextlib.suppress(ConnectionError):  # the daemon hung up or died: nobody is left to serve or to tell
        _serve_or_refuse(setup, channel, said)


def _serve_or_refuse(setup: Setup, channel: socket.socket, said: Said) -> None:
    try:
        _serve(setup, channel, said)
    except DeviceError as error:
        logger("worker").error("this worker ends, for its GPU cannot be used any more: %s", error)
        os._exit(1)  # what is left of a lost context may hang an orderly end
    except ConfigError as error:
        _send(channel, Refused(str(error), tuple(map(str, (error.name, error.value, error.rule, error.remedy)))))
    except MillstreamError as error:
        _send(channel, Refused(str(error)))


def _die_with_parent() -> None:
    """Signals of the terminal or the supervisor are the daemon's to act on; its death is ours too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _serve(setup: Setup, channel: socket.socket, said: Said) -> None:
    check_device(setup.loader)
    decoders, lent, ready = _warmed_up(setup, said)
    if not (packet := channel.recv(PACKET_BYTES)):
        return
    begin, store = _begin.decode(packet), Store.of(setup.loader)
    folder = Path(setup.index_dir) if setup.index_dir else None
    index = Index.open(setup.shards, setup.data, folder, store, ask=False)
    reader = Reader(store, expected=index.fingerprints)
    segment = Segment.attach(begin.segment, begin.slots, begin.slot_bytes)
    if lent:
        device.page_lock(segment.array, setup.loader.gpu_id)
    fillers = [Filler(setup.data, index, reader, decoder, setup.loader.threads, lent) for decoder in decoders]
    _send(channel, ready)
    fills = [partial(_fill, channel, segment, filler) for filler in fillers]
    stop = partial(channel.shutdown, socket.SHUT_RD)
    Hands(fills, partial(_next_task, channel, lent), partial(_send, channel), stop).serve()


def _warmed_up(setup: Setup, said: Said) -> tuple[list[Decoder], LentParts | None, Ready]:
    """A decoder for each hand, known to work; on a GPU also what maps readers' memory, and what all this took."""
    gpu_id, on_gpu = setup.loader.gpu_id, setup.loader.device == "gpu"
    uuid = device_uuid(gpu_id) if on_gpu else ""
    before = nvml.used_bytes(uuid) if on_gpu else 0
    if on_gpu:
        device.wait_asleep(gpu_id)
    decoders = [Decoder(setup.data, setup.loader, said) for _ in range(hands(setup.loader))]
    for decoder in decoders:
        warm_up(decoder)
    if not on_gpu:
        return decoders, None, Ready()
    lent = LentParts(Gpu(gpu_id))
    return decoders, lent, Ready(uuid, max(0, nvml.used_bytes(uuid) - before))


def _next_task(channel: socket.socket, lent: LentParts | None) -> Task | None:
    """The next task, after doing what else the daemon orders; None once it hung up."""
    while packet := channel.recv(PACKET_BYTES):
        order = _order.decode(packet)
        if isinstance(order, Task):
            return order
        if lent:
            lent.forget(order.handle)
        _send(channel, Forgotten(order.handle))
    return None


def _fill(channel: socket.socket, segment: Segment, filler: Filler, task: Task) -> Done:
    return filler.fill(task, segment.payload(task.slot), partial(_announce, channel, task.id))


def _announce(channel: socket.socket, task_id: int, sample_id: int) -> None:
    _send(channel, Progress(task_id, sample_id))


def warm_up(decoder: Decoder) -> None:
    """Decode a picture and a clip of our own, so that libraries and devices are known to work before any sample.

    Raises:
        DataError: they do not.
    """
    if missing := set(AUDIO_FORMS) - set(soundfile.available_formats()):
        raise DataError(f"libsndfile cannot read {', '.join(sorted(missing))}; install libsndfile 1.1 or newer")
    side = WARM_SIDE
    _, picture = cv2.imencode(".jpg", np.full((side, side, 3), 128, np.uint8))
    clip = io.BytesIO()
    soundfile.write(clip, np.zeros(800), 8_000, format="WAV", subtype="PCM_16")
    outcomes = [
        *decoder.decode_images([picture.tobytes()], Bucket(side, side)),
        decoder.decode_audio(clip.getvalue(), 1),
    ]
    for outcome in outcomes:
        if isinstance(outcome, SampleError):
            raise DataError(f"the decoder fails on its own test ({outcome}); check the installation")


def _send(channel: socket.socket, report: Report) -> None:
    channel.sendall(msgspec.msgpack.encode(report))


if __name__ == "__main__":
    main()
