"""The same bits in every run: algorithms whose sums have one order.

With one layout, one kind of machine and the same libraries, losses, gradient norms and weights of two runs are then
equal to the last bit. It costs speed on a GPU. Another layout or another GPU may round otherwise.
"""

import os

import torch

from shared.errors import ConfigError

WORKSPACES = (":4096:8", ":16:8")
"""The settings of CUBLAS_WORKSPACE_CONFIG with which cuBLAS is deterministic."""


def use_deterministic_algorithms() -> None:
    """From here on torch takes deterministic algorithms alone. It must come before the first use of CUDA.

    Raises:
        ConfigError: the environment asks cuBLAS for a workspace that is not deterministic.
    """
    workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACES[0])
    if workspace not in WORKSPACES:
        rule = f"must be {' or '.join(WORKSPACES)} with train.deterministic"
        raise ConfigError("CUBLAS_WORKSPACE_CONFIG", workspace, rule, "leave it out of the environment")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True)
