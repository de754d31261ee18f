"""The pack that layers are timed on is a legal one without room left, and every layer runs on it."""

from pathlib import Path

import pytest
import torch

from shared.batch import groups
from tests.support.runs import run_config
from trainer.layer_times import full_pack
from trainer.loss import token_loss
from trainer.models import build
from trainer.stage_table import Stage, run_file_lines, stages

IMAGES = {"data": {"audio": {"classes_s": []}}}
NO_AUDIO_ROOM = {"data": {"batch": {"tokens": 192}}}


@pytest.mark.parametrize("changes", [{}, IMAGES, NO_AUDIO_ROOM], ids=["mixed", "no clips", "tight"])
def test_the_timed_pack_is_full_and_every_place_is_one_samples(
    tmp_path: Path, changes: dict[str, dict[str, object]]
) -> None:
    config = run_config(tmp_path, "x.tar", **changes)
    group = max(groups(config.data), key=lambda each: each.image_tokens + each.clip_tokens)
    pack = full_pack(config, torch.device("cpu"), torch.float32)
    lengths = pack.cu_seqlens.diff()[: group.samples].tolist()
    assert sum(lengths) == group.tokens and min(lengths) > 0 and pack.cu_seqlens[-1] == group.tokens
    wanted = [n for n, length in enumerate(lengths, 1) for _ in range(length)]
    assert pack.segments_T.tolist() == wanted
    assert pack.positions_T.tolist() == [place for length in lengths for place in range(length)]
    rows = pack.features_T[pack.features_T >= 0]
    assert rows.unique().numel() == rows.numel() > 0
    assert int(rows.max()) < group.images * group.image_tokens + group.clips * group.clip_tokens


def test_the_model_learns_from_the_timed_pack(tmp_path: Path) -> None:
    config = run_config(tmp_path, "x.tar")
    pack = full_pack(config, torch.device("cpu"), torch.float32)
    model = build.build(config, "sdpa")
    loss = token_loss(model((pack.tokens_T, *pack[2:])), pack.labels_T, torch.ones(()))
    torch.autograd.backward(loss)
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.get_submodule("0.vision").blocks[0].get_parameter("qkv.weight").grad.abs().max() > 0


def test_the_table_shares_out_cost_and_is_written_as_a_run_file_reads_it(tmp_path: Path) -> None:
    config = run_config(tmp_path, "x.tar")
    rows = stages(config, [0, 1, 4], [100, 10, 10, 90], [1, 1, 1, 5])
    assert rows == [Stage("encode", 100, 1 / 8), Stage("decoder.0..head", 110, 7 / 8)]
    assert run_file_lines(rows) == "stages:\n  - {layers: encode}\n  - {layers: decoder.0..head}"
