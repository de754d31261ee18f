"""What each process loads at its start: nothing that takes long and that it may never need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN_S = 120.0
HEAVY = ("torch", "transformers", "deepspeed", "nvidia", "fsspec", "rich", "cv2", "webdataset")
STARTS = {
    "dataloader_svc.cli": HEAVY,
    "dataloader_svc.worker": {*HEAVY, "prometheus_client", "http", "typer", "yaml"} - {"cv2"},
    "trainer.client": {"transformers", "deepspeed", "prometheus_client", "typer", "rich", "fsspec", "cv2"},
}
DECODES = """
import io, sys
from PIL import Image
from dataloader_svc.decode import Decoder
from shared.batch import Bucket
from shared.sections import DataSection, DatasetSection, LoaderSection

def loaded(form):
    blob = io.BytesIO()
    Image.new("RGB", (90, 60), (10, 200, 30)).save(blob, form)
    decoder = Decoder(DataSection((DatasetSection("d", ("x.tar",)),)), LoaderSection(threads=1))
    [picture] = decoder.decode_images([blob.getvalue()], Bucket(32, 48))
    assert picture.shape == (32, 48, 3), picture
    decoder.close()
    return any(name.startswith("nvidia.dali") for name in sys.modules)

print(loaded("JPEG"), loaded("PNG"))
"""


def printed(program: str) -> str:
    """Standard output of a Python process of its own."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, check=True, timeout=RUN_S
    ).stdout.strip()


@pytest.mark.parametrize("module", STARTS)
def test_a_start_loads_nothing_heavy_that_it_may_never_need(module: str) -> None:
    tops = printed(f"import {module}, sys; print(*{{name.split('.')[0] for name in sys.modules}})")
    assert set(STARTS[module]) & set(tops.split()) == set()


def test_dali_is_loaded_by_the_first_picture_that_needs_it() -> None:
    assert printed(DECODES) == "False True"
