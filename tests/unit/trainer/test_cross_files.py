"""Cross-attention and the files of `transformers`: a decoder like any other, and a file of our own beside it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import CheckpointError
from shared.sections import RunConfig
from tests.support.crossing import open_gates
from tests.support.hugging import RUN, saved, transformers
from tests.support.packs import MIXED, WRITTEN, global_batch
from tests.support.runs import run_config
from trainer.models import build
from trainer.models.hf import Part
from trainer.weights import export_weights, import_weights, load_initial

PARTS: tuple[Part, ...] = ("vision", "audio", "decoder")


def crossed(folder: Path, every: int = 1, **train: Any) -> RunConfig:
    """A run of `transformers` parts with cross-attention."""
    model = {**RUN["model"], "decoder": {**RUN["model"]["decoder"], "cross_every": every}}
    return run_config(folder, "part-{0..0}.tar", data=RUN["data"], model=model, train=train)


def trained(config: RunConfig) -> dict[str, Tensor]:
    """Weights that no seed gives; gates stand open."""
    model, random = build.build(config, "sdpa"), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("qkv.bias"):
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=random))
    open_gates(model)
    return {name: model.state_dict()[name] for name in build.shapes(config)}


def logits(config: RunConfig, batch: list[Any]) -> list[Tensor]:
    """Of each micro-batch, from the weights in `train.init_from`."""
    model = build.build(config, "sdpa")
    load_initial(model, config)
    with torch.no_grad():
        return [model(inputs) for inputs, _ in batch]


@pytest.mark.parametrize("every", [1, 2])
def test_what_is_exported_comes_back_bit_for_bit(tmp_path: Path, every: int) -> None:
    config = crossed(tmp_path, every)
    state, out = trained(config), tmp_path / "hf"
    export_weights(config, state, out)
    import_weights(config, {part: out / part for part in PARTS}, tmp_path / "parts.safetensors")
    parts = [load_file(tmp_path / "parts.safetensors"), load_file(out / "projectors.safetensors")]
    own = load_file(out / "cross_attention.safetensors")
    assert {name.split(".")[0] for name in own} == {str(block + 1) for block in config.model.decoder.cross_blocks}
    assert all(".cross." in name for name in own) and not any(".cross." in name for part in parts for name in part)
    whole = {name: tensor for part in (*parts, own) for name, tensor in part.items()}
    assert whole.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in whole.items())


def test_transformers_reads_the_decoder_and_computes_text_alone_as_the_model_does(tmp_path: Path) -> None:
    path = tmp_path / "init.safetensors"
    config = crossed(tmp_path, init_from=str(path))
    state = trained(config)
    save_file(state, path)
    export_weights(config, state, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf" / "decoder")
    batch = global_batch(config, WRITTEN, seed=0)
    for found, (inputs, _) in zip(logits(config, batch), batch, strict=True):
        for sample in range(1, int(inputs[2].max()) + 1):
            at = inputs[2] == sample
            with torch.no_grad():
                wanted = theirs(input_ids=inputs[0][at][None].long()).logits[0]
            torch.testing.assert_close(found[at], wanted, rtol=0, atol=1e-5)


def test_an_imported_decoder_starts_as_it_would_without_cross_attention(tmp_path: Path) -> None:
    saved("qwen2-tied", tmp_path / "decoder")
    (tmp_path / "plain").mkdir()
    path = tmp_path / "init.safetensors"
    config = crossed(tmp_path, init_from=str(path))
    import_weights(config, {"decoder": tmp_path / "decoder"}, path)
    plain = crossed(tmp_path / "plain", every=0, init_from=str(path))
    batch = global_batch(config, MIXED, seed=0)
    assert all(torch.equal(one, other) for one, other in zip(logits(config, batch), logits(plain, batch), strict=True))


def test_a_model_without_cross_attention_refuses_a_file_with_it(tmp_path: Path) -> None:
    path = tmp_path / "init.safetensors"
    save_file(trained(crossed(tmp_path)), path)
    plain = crossed(tmp_path, every=0, init_from=str(path))
    with pytest.raises(CheckpointError, match=r"has unknown 1\.cross\."):
        load_initial(build.build(plain, "sdpa"), plain)
