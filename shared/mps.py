"""Where CUDA's Multi-Process Service (MPS) of this user is, for the daemon that may start it and trainers that join it.

A process is an MPS client when a control daemon listens at CUDA_MPS_PIPE_DIRECTORY as CUDA starts in it; where none
does it shares the GPU by time slices, as ever. (NVIDIA, "Multi-Process Service", environment variables.)
"""

import os
from pathlib import Path

from shared.sections import LoaderSection

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
CUDA_PIPE_DIR = Path("/tmp/nvidia-mps")
ROOT = Path("/tmp")


def own_dir() -> Path:
    """The folder of the control daemon that `loader.mps: start` starts: one for all jobs of this user."""
    return ROOT / f"millstream-{os.getuid()}-mps"


def pipe_dir(loader: LoaderSection) -> Path:
    """Where a control daemon is looked for: as the environment says, else our own with `loader.mps: start`."""
    if given := os.environ.get(PIPE_VARIABLE):
        return Path(given)
    return own_dir() / "pipe" if loader.mps == "start" else CUDA_PIPE_DIR


def join(loader: LoaderSection) -> None:
    """Make CUDA, which must not have started in this process, look where `loader.mps: start` put the control daemon."""
    if loader.device == "gpu" and loader.mps == "start":
        os.environ[PIPE_VARIABLE] = str(pipe_dir(loader))
