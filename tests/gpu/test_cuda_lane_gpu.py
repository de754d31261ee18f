"""Laws of the cuda lane on a GPU that a daemon and its readers share. `pytest tests/gpu/test_cuda_lane_gpu.py -rP`.

Every test prints what it saw; two minutes in all. MPS is left out: it must not matter.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shared.cuda import GRANULE_BYTES, Gpu, count_gpus, device_uuid
from shared.errors import DeviceError
from tests.support.daemons import ROOT, make_run, serving, wait_until
from tests.support.ports import free_port
from tests.support.site import Site
from trainer.batches import Batch
from trainer.client import LoaderClient
from trainer.lending import GpuAllocator
from trainer.preprocess import Preprocessor, Tensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(count_gpus() == 0, reason="no CUDA device")]

SLOW_CYCLES = 20_000_000
STEPS = 12
NOISE_BYTES = 64 << 20
LOADER = {"device": "gpu", "mps": "off", "shm_dir": "/dev/shm", "slots_per_stream": 8, "max_streams": 1}
DATA = {
    "image": {"pixel_budget": 512 * 512, "patch": 32},
    "batch": {"tokens": 4096, "micro_batches": 2, "round": 2},
}
LENT = """
import sys
from shared.cuda import Gpu
gpu = Gpu(0)
address = gpu.open(bytes.fromhex(sys.argv[1]))
gpu.zero(address, int(sys.argv[2]))
gpu.finish()
gpu.close(address)
sys.stdout.write(gpu.uuid)
"""


def say(text: str) -> None:
    """For who reads what a run printed."""
    sys.stdout.write(text + "\n")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A daemon that decodes on GPU 0."""
    started = time.monotonic()
    loader = {**LOADER, "metrics_port": free_port()}
    path, config = make_run(tmp_path_factory.mktemp("gpu"), samples=96, loader=loader, data=DATA)
    with serving(path) as daemon:
        say(f"daemon ready after {time.monotonic() - started:.1f} s")
        yield Site(path, config, daemon)
        say("the daemon's log:\n" + daemon.log[-3000:])


def client_of(site: Site, lane: Any = "cuda", **options: Any) -> LoaderClient:
    options = {"steps": STEPS, "wait_s": 60, "verify": True, **options}
    return LoaderClient(site.config.loader.endpoint, data=site.config.data, lane=lane, device="cuda:0", **options)


def look(batch: Batch) -> tuple[Any, ...]:
    fields = {name: tensor.cpu().clone() for name, tensor in batch.fields.items()}
    return batch.cursor, batch.batch_id, batch.sample_ids, batch.checksum, fields


def assert_same(found: list[tuple[Any, ...]], wanted: list[tuple[Any, ...]]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one[:4] == other[:4]
        for name, tensor in one[4].items():
            assert torch.equal(tensor, other[4][name]), f"{name} of batch {one[1]}"


def poison_on_release(client: LoaderClient) -> None:
    """From its release on a part holds nonsense, before the daemon knows that it may be written."""
    tell = client._leases._give_back

    def spoil(batch: Batch, session: object) -> None:
        if batch.pixels is not None:
            batch.pixels.fill_(0xFF)
            torch.cuda.synchronize()
        tell(batch, session)

    client._leases._give_back = spoil


def used_bytes() -> int:
    """Of the whole device, by every process."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(0)
    return int(total - free)


@pytest.fixture(scope="module")
def slots(site: Site) -> list[tuple[Any, ...]]:
    """What the slots lane gives."""
    with client_of(site, "slots") as client:
        return [look(batch) for batch in client]


def test_memory_of_ours_is_written_by_another_process():
    gpu = Gpu(0)
    allocation = GpuAllocator(gpu).allocate(100)
    assert allocation.tensor.nbytes == GRANULE_BYTES
    allocation.tensor.fill_(7)
    torch.cuda.synchronize()
    command = [sys.executable, "-c", LENT, allocation.handle.hex(), "64"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    say(f"opened on {done.stdout.strip()}; here is {device_uuid(0)}")
    assert done.stdout.strip() == device_uuid(0)
    assert allocation.tensor[:65].tolist() == [0] * 64 + [7]
    with pytest.raises(DeviceError, match="cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_") as error:
        gpu.open(allocation.handle)
    say(f"in the process that made it: {error.value}")
    allocation.free()


def test_pixels_are_those_of_the_slots_lane_and_no_batch_sees_another(site: Site, slots: list[tuple[Any, ...]]):
    with client_of(site) as client:
        poison_on_release(client)
        found, there = [], 0
        for batch in client:
            there += batch.pixels is not None
            assert batch.pixels is None or batch.fields["pixels_NHWC"].is_cuda
            found.append(look(batch))
    pictures = sum(bool(each[4]["pixels_NHWC"].numel()) for each in slots)
    say(f"{there} of {pictures} batches with pictures came in device memory, of {len(found)} in all")
    assert_same(found, slots)
    assert there >= pictures - LOADER["slots_per_stream"]  # type: ignore[operator]
    assert there > 0


def test_a_step_that_lags_sees_its_own_pixels(site: Site):
    """Copies out of device memory wait for steps that sleep on the compute stream; released parts are poisoned."""

    def tensors(lane: str) -> list[Tensors]:
        preprocess, found = Preprocessor(site.config.data, site.config.model, "cuda:0"), []
        with client_of(site, lane, verify=False) as client:
            poison_on_release(client)
            for batch in preprocess.prefetch(client):
                torch.cuda._sleep(SLOW_CYCLES)
                found.append(Tensors(*(tensor.clone() for tensor in batch.tensors)))
        return found

    for one, other in zip(tensors("slots"), tensors("cuda"), strict=True):
        for name, a, b in zip(Tensors._fields, one, other, strict=True):
            assert torch.equal(a, b), name


def run_reader(site: Site, batches: int, *stay: str, **environment: str) -> "subprocess.Popen[str]":
    command = [
        sys.executable,
        "-m",
        "tests.support.cuda_reader_program",
        site.config.loader.endpoint,
        str(batches),
        *stay,
    ]
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    around = {**os.environ, **environment, "PYTHONPATH": paths}
    return subprocess.Popen(command, cwd=ROOT, env=around, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def told(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout and process.stderr
    line = process.stdout.readline()
    if not line:
        pytest.fail(f"the reader ended: {process.stderr.read()[-3000:]}")
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_killed_reader_leaves_nothing_and_the_next_goes_on(site: Site, slots: list[tuple[Any, ...]]):
    before = used_bytes()
    with run_reader(site, 10, "stay") as process:
        try:
            seen = told(process)["seen"]
            during, lent = used_bytes(), site.metric("loader_device_bytes", use="lent")
        finally:
            process.kill()
    wait_until(lambda: site.metric("loader_device_bytes", use="lent") == 0, "the daemon lets go")
    wait_until(lambda: used_bytes() <= before + NOISE_BYTES, "its memory is free")
    after = used_bytes()
    say(f"used before {before >> 20}, during {during >> 20}, after {after >> 20} MiB; {lent / 2**20:.0f} MiB were lent")
    say(f"in device memory: {''.join('.D'[there] for _, there in seen)}")
    assert lent > NOISE_BYTES and during - before >= lent
    with client_of(site) as client:
        assert_same([look(batch) for batch in client], slots)


def test_memory_is_bounded_and_comes_back(site: Site):
    with client_of(site) as client:
        next(client)
    before, taken = used_bytes(), []
    for _ in range(4):
        with client_of(site) as client:
            next(batch for batch in client if batch.pixels is not None)
            assert site.metric("loader_device_bytes", use="lent") > 0
            taken.append(used_bytes() - before)
    left = used_bytes() - before
    workers = site.metric("loader_device_bytes", use="workers")
    say(f"four clients took {[size >> 20 for size in taken]} MiB each and left {left >> 20} MiB")
    say(f"the decode worker's context and decoder: {workers / 2**20:.0f} MiB (0: NVML does not tell)")
    assert max(taken) - min(taken) < NOISE_BYTES // 4
    assert left < NOISE_BYTES // 4


def test_a_killed_worker_costs_nothing_but_time(site: Site, slots: list[tuple[Any, ...]]):
    with client_of(site) as client:
        found, where = [], []
        for number, batch in enumerate(client):
            if number == 6:
                victim = site.daemon.workers()[0]
                subprocess.run(["kill", "-9", str(victim)], check=True)
            found.append(look(batch))
            where.append(batch.pixels is not None)
    say(f"worker {victim} killed at batch 6; in device memory: {''.join('.D'[each] for each in where)}")
    assert_same(found, slots)
    assert any(where[12:])


def test_torchs_allocator_does_not_matter(site: Site, slots: list[tuple[Any, ...]]):
    setting = "expandable_segments:True"
    with run_reader(site, 2 * STEPS, PYTORCH_CUDA_ALLOC_CONF=setting, PYTORCH_ALLOC_CONF=setting) as process:
        seen = told(process)["seen"]
    say(f"with {setting}, in device memory: {''.join('.D'[there] for _, there in seen)}")
    assert [checksum for checksum, _ in seen] == [each[3] for each in slots]
    assert any(there for _, there in seen)


def test_a_reader_that_has_the_stream_with_another_gets_slots(site: Site):
    with client_of(site, readers=2, steps=None) as client:
        welcome = client.connect()
    say(f"refused: {welcome.device_refusal}")
    assert (welcome.device_parts, welcome.device_refusal) == (0, "2 readers share the stream")
