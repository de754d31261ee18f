"""What a run file's text may hold: known keys, once each, of the right type and in their range."""

import types
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shared.config import endpoint, load, run_dir
from shared.errors import ConfigError
from shared.sections import RunConfig
from tests.support.runs import run_file


def numbers(section: type[msgspec.Struct] = RunConfig, prefix: str = "") -> Iterator[str]:
    """The dotted name of every key that holds one number which counts or measures something."""
    hints = typing.get_type_hints(section)
    for field in msgspec.structs.fields(section):
        union = typing.get_origin(hints[field.name]) in (typing.Union, types.UnionType)
        kinds = typing.get_args(hints[field.name]) if union else (hints[field.name],)
        if isinstance(kinds[0], type) and issubclass(kinds[0], msgspec.Struct):
            yield from numbers(kinds[0], f"{prefix}{field.name}.")
        elif kinds[0] in (int, float) and field.name != "seed":
            yield prefix + field.name


def refused(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return caught.value


@pytest.mark.parametrize(("value", "shown"), [(".nan", "nan"), ("-.inf", "-inf"), (".inf", "inf"), ("-1000000", None)])
def test_no_number_is_taken_that_has_no_meaning(tmp_path: Path, value: str, shown: str | None) -> None:
    path = run_file(tmp_path, "x.tar")
    for name in numbers():
        error = refused(path, f"{name}={value}")
        assert (error.name, str(error.value)) == (name, shown or value)


def test_there_are_numbers_to_hold() -> None:
    assert {"train.steps", "loader.lease_s", "model.decoder.rope_theta", "train.recompute.vision"} <= set(numbers())


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.steps=0", "train.steps (0) must be at least 1; "),
        ("train.keep=0", "train.keep (0) must be at least 1; "),
        ("loader.metrics_port=70000", "loader.metrics_port (70000) must be at most 65535; "),
        ("train.optim.betas=[0.9, 1.0]", "train.optim.betas[1] (1.0) must be below 1; "),
        ("loader.quarantine.max_share=1.5", "loader.quarantine.max_share (1.5) must be at most 1; "),
        ("model.decoder.heads=0", "model.decoder.heads (0) must be at least 1; "),
        ("data.image.ratios=[[0, 1]]", "data.image.ratios"),
        ("data.audio.rate_hz=0", "data.audio.rate_hz (0) must be at least 1; "),
        ("data.datasets=[{name: a, shards: []}]", "data.datasets[0].shards"),
        ("mesh.data=99999999999999999999", "mesh.data (99999999999999999999) must be at most 65536"),
        ("model.decoder.head_dim=3", "model.decoder.head_dim (3) must be even"),
        ("train.run_dir=runs/{name}", "has {name} in it, which nothing stands for; {uid} and {job} are filled in"),
        ("loader.endpoint='ipc:///tmp/{}.sock'", "has {} in it"),
        ("loader.endpoints=['tcp://{host}:1']", "loader.endpoints (tcp://{host}:1) has {host} in it"),
        ("train.optim.betas=[0.9", "--set (train.optim.betas=[0.9) is not YAML"),
        ("train.optim={lr: 1, lr: 2}", "a section has lr twice"),
    ],
)
def test_a_value_out_of_its_range_is_refused_with_both(tmp_path: Path, override: str, words: str) -> None:
    text = str(refused(run_file(tmp_path, "x.tar"), override))
    assert words in text
    assert "\n" not in text


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = run_file(tmp_path, "x.tar")
    path.write_text(path.read_text() + "train: {steps: 1}\n")
    error = refused(path)
    assert "is not YAML (a section has train twice" in str(error)


def test_what_a_merge_brings_may_be_set_again(tmp_path: Path) -> None:
    sets = ["train.optim={lr: 0.5, clip: 2.0}", "train.optim={<<: {lr: 0.5, clip: 2.0}, lr: 0.25}"]
    for override, lr in zip(sets, (0.5, 0.25), strict=True):
        optim = load(run_file(tmp_path, "x.tar"), [override]).train.optim
        assert (optim.lr, optim.clip) == (lr, 2.0)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"job: \xff\xfe")
    assert "is not UTF-8 text" in str(refused(path))


def test_the_names_that_an_address_and_a_folder_may_hold_are_filled_in(tmp_path: Path) -> None:
    path = run_file(tmp_path, "x.tar", job="night")
    config = load(path, ["train.run_dir=runs/{job}", "loader.endpoint='ipc:///tmp/{job}.sock'"])
    assert (run_dir(config), endpoint(config)) == (tmp_path / "runs" / "night", "ipc:///tmp/night.sock")
