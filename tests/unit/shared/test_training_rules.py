"""Training options that cannot work are refused with name, value, rule and remedy."""

from pathlib import Path

import pytest

from shared.config import load
from shared.errors import ConfigError
from tests.support.runs import run_file

PARTS = "[vision, audio, vision_projector, audio_projector, embedding, decoder, head]"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["mesh.pipe=2", "train.zero_stage=2"], "train.zero_stage (2) cannot run with pipeline parallelism"),
        (["mesh.pipe=2", "train.zero_stage=3"], "train.zero_stage (3) cannot run with pipeline parallelism"),
        (["mesh.tensor=2", "train.zero_stage=3"], "train.zero_stage (3) is not proven with tensor parallelism"),
        (["train.precision=bf16", "train.zero_stage=0"], "without ZeRO the gradients would be summed in bf16"),
        (["train.offload_optimizer=true", "train.zero_stage=0"], "needs train.zero_stage 1, 2 or 3"),
        (["train.recompute.vision=2"], "train.recompute.vision (2) must be all, or from -1 to 1"),
        (["train.recompute.decoder=-3"], "train.recompute.decoder (-3) must be all, or from -2 to 2"),
        (["train.recompute.decoder=some"], "train.recompute.decoder"),
        ([f"train.freeze={PARTS}"], "train.freeze (every part) must leave something to train"),
        (["train.freeze=[vison]"], "train.freeze"),
        (["train.freeze=[head]", "model.decoder.tied=true"], "both or neither of embedding and head"),
        (["model.gradient_cuts={2: [audio]}"], "model.gradient_cuts (2) must be a decoder layer, 0 to 1"),
        (["model.gradient_cuts={0: [sound]}"], "model.gradient_cuts"),
        (["model.detach=[text]"], "model.detach"),
        (["model.decoder.cross_every=3"], "model.decoder.cross_every (3) must be from 0 to model.decoder.depth, 2"),
        (["train.skip_limit=0"], "train.skip_limit (0) must be at least 1"),
    ],
)
def test_each_rule_is_told_in_words(tmp_path: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(run_file(tmp_path, "x.tar"), overrides)
    assert words in str(caught.value)


def test_what_they_allow_loads(tmp_path: Path) -> None:
    sets = ["train.recompute={vision: all, audio: -1, decoder: 1}", "train.freeze=[vision, audio]"]
    cuts = ["model.detach=[audio]", "model.gradient_cuts={0: [audio], 1: [vision, text]}"]
    config = load(run_file(tmp_path, "x.tar"), [*sets, *cuts, "train.zero_stage=3", "train.offload_optimizer=true"])
    assert config.train.recompute.vision == "all"
    assert config.model.gradient_cuts == {0: ("audio",), 1: ("vision", "text")}
