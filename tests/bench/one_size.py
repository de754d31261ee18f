"""A run file whose micro-batches are so many pictures of one size, and captions: what transport and GPU decode move."""

from collections.abc import Mapping
from pathlib import Path

import yaml


def run_file(
    place: Path, shards: str, images: int, side: int, patch: int, caption_tokens: int, loader: Mapping[str, object]
) -> Path:
    """`images` of `side` x `side` pixels a micro-batch, for one stream, at an address in `place`."""
    place.mkdir(parents=True, exist_ok=True)
    each = (side // patch) ** 2 + caption_tokens + 2
    data = {
        "datasets": [{"name": "bench", "shards": [shards]}],
        "image": {"patch": patch, "pixel_budget": side * side, "buckets": [[side, side]]},
        "audio": {"classes_s": [0.08]},
        "text": {"max_tokens": caption_tokens, "expected_tokens": caption_tokens},
        "batch": {"tokens": -(-images * each // 64) * 64, "micro_batches": 1, "round": 1},
    }
    fixed = {"endpoint": f"ipc://{place}/loader.sock", "metrics_port": 0, "max_streams": 1}
    path = place / "run.yaml"
    path.write_text(yaml.safe_dump({"job": "bench", "data": data, "loader": {**fixed, **loader}}))
    return path
