"""A run file is refused whole, before anything starts, with name, value, rule and remedy."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.config import digest, load
from shared.errors import ConfigError
from tests.support.runs import run_config, run_file


def refusal(tmp_path: Path, *overrides: str, **changes: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(run_file(tmp_path, "x.tar", **changes), overrides)
    return caught.value


def test_an_unknown_key_is_refused_with_the_nearest_known_one(tmp_path: Path) -> None:
    error = refusal(tmp_path, "data.image.pixel_buget=4096")
    assert str(error) == "data.image.pixel_buget (4096) is not a key of the run file; did you mean pixel_budget?"


def test_an_unknown_key_inside_a_list_is_found_too(tmp_path: Path) -> None:
    error = refusal(tmp_path, "data.datasets=[{name: a, shards: [x], shard: 1}]")
    assert "did you mean shards?" in str(error)


def test_a_wrong_type_names_key_and_types(tmp_path: Path) -> None:
    error = refusal(tmp_path, "train.steps=many")
    assert error.name == "train.steps"
    assert "expected `int`, got `str`" in str(error)


@pytest.mark.parametrize("written", ["1e-4", "1E-4", "+1e-4", "1.0e-4", "0.0001"])
def test_a_power_of_ten_is_a_number_with_or_without_a_point(tmp_path: Path, written: str) -> None:
    path = run_file(tmp_path, "x.tar", train={"optim": {"lr": 0.5}})
    assert load(path, [f"train.optim.lr={written}"]).train.optim.lr == 1e-4
    path.write_text(path.read_text().replace("lr: 0.5", f"lr: {written}"))
    assert load(path).train.optim.lr == 1e-4


def test_a_bucket_side_off_the_lcm_is_refused_with_the_nearest_sides(tmp_path: Path) -> None:
    error = refusal(tmp_path, "data.image.buckets=[[96, 100]]")
    assert error.name == "data.image.buckets"
    assert str(error).endswith("must be a multiple of 16 (LCM of patch x merge and align); nearest are 96 and 112")


def test_the_lcm_counts_patch_merge_and_alignment(tmp_path: Path) -> None:
    error = refusal(tmp_path, "data.image={patch: 14, merge: 2, align: 8, buckets: [[28, 56]]}")
    assert "multiple of 56" in str(error)


def test_a_zero_side_is_refused(tmp_path: Path) -> None:
    assert "side 0" in str(refusal(tmp_path, "data.image.buckets=[[0, 16]]"))


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("data.batch.tokens=100", "data.batch.tokens"),
        ("data.batch.tokens=64", "data.batch.tokens"),
        ("data.batch.micro_batches=3", "data.batch.micro_batches"),
        ("data.audio.classes_s=[1.05]", "data.audio.classes_s"),
        ("data.audio.classes_s=[60.0]", "data.audio.classes_s"),
        ("data.audio.samples_per_token=1000", "data.audio.samples_per_token"),
        ("data.image.pixel_budget=100", "data.image.pixel_budget"),
        ("mesh.data=3", "mesh.data"),
        ("mesh.tensor=3", "mesh.tensor"),
        ("mesh.pipe=0", "mesh.pipe"),
        ("loader.heartbeat_s=100", "loader.heartbeat_s"),
        ("loader.drain_s=100", "loader.drain_s"),
        ("loader.slots_per_stream=1", "loader.slots_per_stream"),
        ("loader.absent_s=0", "loader.absent_s"),
        ("loader.held_up_s=-1", "loader.held_up_s"),
        ("train.wait_s=0.1", "train.wait_s"),
        ("model.decoder.kv_heads=3", "model.decoder.kv_heads"),
        ("model.vision.dim=33", "model.vision.dim"),
        ("job='a b'", "job"),
        ("data.datasets=[]", "data.datasets"),
    ],
)
def test_each_rule_names_its_setting(tmp_path: Path, override: str, name: str) -> None:
    error = refusal(tmp_path, override)
    assert error.name == name
    assert error.remedy and error.rule


def test_zero_two_under_a_pipeline_is_refused_with_the_rule(tmp_path: Path) -> None:
    error = refusal(tmp_path, "mesh.pipe=2", "train.zero_stage=2")
    assert "cannot run with pipeline parallelism" in str(error)


def test_a_missing_or_broken_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        load(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="must be a mapping"):
        load(tmp_path / "list.yaml")


@pytest.mark.parametrize("override", ["novalue", "=1", "job.deeper=1"])
def test_a_malformed_override_is_refused(tmp_path: Path, override: str) -> None:
    assert refusal(tmp_path, override).name == "--set"


def test_overrides_reach_nested_keys_and_make_sections(tmp_path: Path) -> None:
    config = load(run_file(tmp_path, "x.tar"), ["train.optim.lr=0.5", "loader.quarantine.max_share=0.9"])
    assert (config.train.optim.lr, config.loader.quarantine.max_share) == (0.5, 0.9)


def test_paths_are_relative_to_the_run_file(tmp_path: Path) -> None:
    config = run_config(tmp_path, "shards/a-{0..3}.tar", data={"text": {"tokenizer": "t.json"}})
    assert config.data.datasets[0].shards == (str(tmp_path / "shards/a-{0..3}.tar"),)
    assert config.data.text.tokenizer == str(tmp_path / "t.json")


def test_the_digest_follows_the_data_not_the_folder(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    here, there = run_config(tmp_path, "a.tar"), run_config(tmp_path / "other", "a.tar")
    assert digest(here.data) == digest(there.data)
    assert digest(msgspec.structs.replace(here.data, seed=1)) != digest(here.data)


def test_the_digest_is_the_same_in_every_process(tmp_path: Path) -> None:
    path = run_file(tmp_path, "a.tar")
    code = f"from shared.config import *; print(digest(load({str(path)!r}).data))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": str(n), "PYTHONPATH": "."},
            capture_output=True,
            text=True,
        ).stdout
        for n in (1, 2)
    }
    assert seen == {digest(load(path).data) + "\n"}
