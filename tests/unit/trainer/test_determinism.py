"""What `train.deterministic` sets, in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.ranks import ROOT

CODE = """
import json, os
import torch
from trainer.determinism import use_deterministic_algorithms
use_deterministic_algorithms()
torch.manual_seed(7)
print(json.dumps([
    torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark,
    os.environ["CUBLAS_WORKSPACE_CONFIG"], float(torch.rand(()))]))
"""


def run(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """In a fresh interpreter."""
    every = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, "-c", code], env=every, capture_output=True, text=True, timeout=300)


def test_algorithms_and_seeds_are_fixed() -> None:
    one, other = (json.loads(run(CODE, PYTHONHASHSEED=seed).stdout) for seed in ("1", "2"))
    assert one[:4] == [True, True, False, ":4096:8"]
    assert one == other


@pytest.mark.parametrize(("workspace", "code"), [(":16:8", 0), (":0:0", 1)])
def test_a_workspace_that_is_not_deterministic_is_refused(workspace: str, code: int) -> None:
    done = run(CODE, CUBLAS_WORKSPACE_CONFIG=workspace)
    refused = "CUBLAS_WORKSPACE_CONFIG (:0:0) must be :4096:8 or :16:8 with train.deterministic" in done.stderr
    assert (done.returncode, refused) == (code, bool(code))
