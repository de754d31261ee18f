"""Run files for tests: a small model over a small mixed dataset."""

from pathlib import Path
from typing import Any

import yaml

from shared.config import load
from shared.sections import RunConfig

SMALL: dict[str, Any] = {
    "data": {
        "image": {"pixel_budget": 64 * 64, "patch": 16},
        "audio": {"classes_s": [1.0, 3.0], "samples_per_token": 1600, "rate_hz": 16000},
        "text": {"tokenizer": "bytes", "max_tokens": 48, "expected_tokens": 24},
        "batch": {"tokens": 256, "micro_batches": 4, "round": 2},
    },
    "loader": {"workers": 1, "threads": 2, "metrics_port": 0, "heartbeat_s": 0.2, "lease_s": 60, "drain_s": 3},
    "model": {
        "vision": {"dim": 32, "depth": 1, "heads": 2, "mlp": 64, "grid": 4},
        "audio": {"dim": 32, "depth": 1, "heads": 2, "mlp": 64},
        "decoder": {"vocab": 320, "dim": 48, "depth": 2, "heads": 4, "kv_heads": 2, "mlp": 96},
    },
    "train": {"steps": 6, "precision": "fp32", "log_every": 1, "device": "cpu", "wait_s": 60},
}


def run_file(folder: Path, shards: str, job: str = "test", **changes: dict[str, Any]) -> Path:
    """Write `run.yaml` in `folder`: SMALL with `changes` merged section by section; sockets and runs stay in it."""
    tree: dict[str, Any] = {k: dict(v) for k, v in SMALL.items()}
    tree["job"] = job
    tree["data"]["datasets"] = [{"name": "set", "shards": [shards]}]
    tree["loader"]["endpoint"] = f"ipc://{folder}/loader.sock"
    tree["train"]["run_dir"] = str(folder / "run")
    for section, values in changes.items():
        for key, value in values.items():
            old = tree.setdefault(section, {}).get(key)
            tree[section][key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def run_config(folder: Path, shards: str, **changes: dict[str, Any]) -> RunConfig:
    """`run_file`, loaded."""
    return load(run_file(folder, shards, **changes))
