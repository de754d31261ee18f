"""Run file -> what DeepSpeed is told; users are never asked for it."""

from typing import Any

import torch

from shared.sections import RunConfig

PERSISTENT_ELEMENTS = 1 << 12
"""ZeRO-3 keeps parameters below this size (norms, biases) whole on every rank: gathering them costs more."""


def micro_batches_per_rank(config: RunConfig) -> int:
    """How many micro-batches a data-parallel rank takes of each global batch."""
    return config.data.batch.micro_batches // config.mesh.data


def deepspeed_config(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """DeepSpeed's settings of a run on `device`."""
    train = config.train
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches_per_rank(config),
        "steps_per_print": None,
        "gradient_clipping": train.optim.clip if train.zero_stage else 0.0,
        "zero_optimization": _zero(config, device),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": train.precision == "bf16", "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    }


def _zero(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """Offloaded state is stepped by torch's own optimizer on the CPU: DeepSpeed's would be compiled at first use."""
    found: dict[str, Any] = {"stage": config.train.zero_stage}
    if config.train.zero_stage == 3:
        found["stage3_param_persistence_threshold"] = PERSISTENT_ELEMENTS
    if config.train.offload_optimizer:
        found["offload_optimizer"] = {"device": "cpu", "pin_memory": device.type == "cuda"}
    return found
