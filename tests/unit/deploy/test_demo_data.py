"""The demo data set: repeatable bytes, readable members, upright pictures, audible speech."""

import hashlib
import io
import tarfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image, ImageOps
from tokenizers import Tokenizer

from deploy.demo import build_data, espeak, pictures, speech, stamps, tokenizer
from deploy.demo.summary import Summary
from shared.errors import ConfigError

SAMPLES, SHARDS, SEED = 48, 8, 0
Members = dict[str, dict[str, bytes]]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary]:
    out_dir = tmp_path_factory.mktemp("demo") / "set"
    return out_dir, build_data.build(out_dir, SAMPLES, SHARDS, SEED, progress=False)


@pytest.fixture(scope="module")
def members(demo: tuple[Path, Summary]) -> Members:
    """Every sample of the set: key, then extension, then bytes."""
    found: Members = defaultdict(dict)
    for path in sorted(demo[0].glob("demo-*.tar")):
        for name, data in read_tar(path).items():
            key, extension = name.split(".")
            assert extension not in found[key], f"{name} twice"
            found[key][extension] = data
    return dict(found)


def read_tar(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {info.name: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]


def digests(out_dir: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out_dir.iterdir())}


def planned() -> list[build_data.Sample]:
    return [sample for shard in build_data.plan(SAMPLES, SHARDS, SEED) for sample in shard]


def difference(picture: Image.Image, other: Image.Image) -> float:
    """Mean absolute difference after a blur that hides what JPEG does to fine texture."""
    small = (picture.width // 8, picture.height // 8)
    pixels = [np.asarray(p.convert("L").resize(small, Image.Resampling.BOX), float) for p in (picture, other)]
    return float(np.abs(pixels[0] - pixels[1]).mean())


def test_equal_arguments_give_equal_bytes(demo: tuple[Path, Summary], tmp_path: Path) -> None:
    build_data.build(tmp_path, SAMPLES, SHARDS, SEED, progress=False)
    assert digests(tmp_path) == digests(demo[0])
    assert {shard.name: shard.sha256 for shard in demo[1].shards}.items() <= digests(tmp_path).items()


def test_another_seed_gives_other_bytes(demo: tuple[Path, Summary], tmp_path: Path) -> None:
    build_data.build(tmp_path, 8, 1, seed=1, progress=False)
    assert digests(tmp_path)["demo-000000.tar"] != digests(demo[0])["demo-000000.tar"]


def test_members_are_the_plan(members: Members) -> None:
    assert sorted(members) == [f"{index:06d}" for index in range(SAMPLES)]
    for sample in planned():
        expected = {"txt"} | ({sample.crop.extension} if sample.crop else set())
        expected |= {sample.speech.delivery.encoding.extension} if sample.speech else set()
        assert set(members[sample.key]) == expected
        assert members[sample.key]["txt"].decode("utf-8") == sample.caption


def test_every_shard_mixes_the_modalities() -> None:
    for shard in build_data.plan(SAMPLES, SHARDS, SEED):
        assert {sample.modality for sample in shard} == set(build_data.SHARES)


def test_default_shares() -> None:
    samples = [sample.modality for shard in build_data.plan(640, 8, 0) for sample in shard]
    assert [samples.count(modality) for modality in build_data.SHARES] == [288, 192, 160]


def test_aspects_and_sizes(demo: tuple[Path, Summary], members: Members) -> None:
    assert set(demo[1].counts["aspect"]) == {aspect.name for aspect in pictures.ASPECTS}
    for crop, picture in upright_pictures(members):
        assert crop.aspect.ratio == pytest.approx(picture.width / picture.height, rel=pictures.RATIO_JITTER + 0.02)
        assert pictures.MIN_SIDE_PX <= min(picture.size) <= max(picture.size) <= pictures.MAX_SIDE_PX


def test_pictures_show_upright_after_exif(members: Members) -> None:
    seen = set()
    for crop, picture in upright_pictures(members):
        seen.add(crop.orientation)
        assert picture.size == crop.size
        assert difference(picture, pictures.render(crop)) < 2
    assert len(seen) > 1, "the set must hold rotated pictures"


def upright_pictures(members: Members) -> list[tuple[pictures.Crop, Image.Image]]:
    crops = [(sample.key, sample.crop) for sample in planned() if sample.crop]
    opened = [(crop, Image.open(io.BytesIO(members[key][crop.extension]))) for key, crop in crops]
    return [(crop, ImageOps.exif_transpose(picture)) for crop, picture in opened]


@pytest.mark.parametrize("orientation", range(2, 9))
def test_each_orientation_turns_upright(orientation: int) -> None:
    box, size = (40, 10, 440, 290), (200, 140)
    crop = pictures.Crop(pictures.PHOTOS[4], pictures.ASPECTS[1], box, size, "jpg", orientation, quality=95)
    stored = Image.open(io.BytesIO(pictures.encode(crop)))
    assert stored.getexif()[pictures.ORIENTATION_TAG] == orientation
    assert difference(ImageOps.exif_transpose(stored), pictures.render(crop)) < 2
    assert stored.size != size or difference(stored, pictures.render(crop)) > 10


def test_speech_decodes_as_planned(demo: tuple[Path, Summary], members: Members) -> None:
    total_s, channels = 0.0, set()
    for sample in planned():
        if sample.speech:
            encoding = sample.speech.delivery.encoding
            wave, rate_hz = soundfile.read(io.BytesIO(members[sample.key][encoding.extension]), always_2d=True)
            assert (rate_hz, wave.shape[1]) == (encoding.rate_hz, encoding.channels)
            assert np.abs(wave).max() > 0.05, f"{sample.key} is silent"
            total_s += len(wave) / rate_hz
            channels.add(encoding.channels)
    assert channels == {1, 2}
    assert total_s == pytest.approx(demo[1].speech_duration_s, abs=0.01)


def test_resampling_keeps_a_tone() -> None:
    seconds = np.arange(22_050) / 22_050
    tone = (10_000 * np.sin(2 * np.pi * 440 * seconds)).astype(np.int16)
    expected = 10_000 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert np.abs(speech.resample(tone, 22_050, 16_000) - expected).max() < 5


def test_an_unknown_voice_is_named() -> None:
    with pytest.raises(espeak.EspeakError, match="nobody"):
        espeak.synthesize([espeak.Utterance("hello", "nobody", 160, 50)])


def test_a_long_data_path_is_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert espeak._short_path(tmp_path) == tmp_path
    monkeypatch.setattr(espeak, "MAX_DATA_PATH", len(str(tmp_path)) - 1)
    assert espeak._short_path(tmp_path) != tmp_path
    assert espeak._short_path(tmp_path).resolve() == tmp_path.resolve()


def test_tokenizer(demo: tuple[Path, Summary], members: Members) -> None:
    trained = Tokenizer.from_file(str(demo[0] / "tokenizer.json"))
    tokens = ("<pad>", "<bos>", "<eos>", "<image>", "<audio>")
    assert [trained.token_to_id(token) for token in tokens] == [0, 1, 2, 3, 4]
    assert trained.get_vocab_size() <= 1024
    for sample in members.values():
        caption = sample["txt"].decode()
        assert trained.decode(trained.encode(caption).ids) == caption


def test_the_default_captions_fill_the_vocabulary() -> None:
    captions = [sample.caption for shard in build_data.plan(640, 8, 0) for sample in shard]
    assert tokenizer.train(captions).get_vocab_size() == tokenizer.VOCAB_SIZE


def test_a_second_call_builds_nothing(demo: tuple[Path, Summary], capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in demo[0].iterdir()}
    assert build_data.build(demo[0], SAMPLES, SHARDS, SEED) == demo[1]
    assert {path: path.stat().st_mtime_ns for path in demo[0].iterdir()} == before
    assert "already holds" in capsys.readouterr().out


def test_another_set_is_replaced_only_by_force(tmp_path: Path) -> None:
    build_data.build(tmp_path, 6, 3, progress=False)
    with pytest.raises(ConfigError, match="--force"):
        build_data.build(tmp_path, 6, 2, progress=False)
    build_data.build(tmp_path, 6, 2, progress=False, force=True)
    assert [path.name for path in sorted(tmp_path.glob("*.tar"))] == ["demo-000000.tar", "demo-000001.tar"]


def test_a_damaged_set_is_built_again(tmp_path: Path) -> None:
    whole = build_data.build(tmp_path, 6, 2, progress=False)
    (tmp_path / "demo-000001.tar").write_bytes(b"")
    assert build_data.build(tmp_path, 6, 2, progress=False) == whole
    assert hashlib.sha256((tmp_path / "demo-000001.tar").read_bytes()).hexdigest() == whole.shards[1].sha256


@pytest.mark.parametrize(("samples", "shards"), [(4, 8), (8, 0), (2_000_000, 8)])
def test_senseless_counts_are_refused(tmp_path: Path, samples: int, shards: int) -> None:
    with pytest.raises(ConfigError, match="must"):
        build_data.build(tmp_path, samples, shards)


def test_stamps_take_the_caption_in_the_language_of_the_speech(tmp_path: Path) -> None:
    for name, spoken in {"frog": ("_desc.ogg", "_desc_es.ogg"), "owl": ("_desc_es.ogg",), "yak": ()}.items():
        (tmp_path / f"{name}.png").touch()
        (tmp_path / f"{name}.txt").write_text(f"A {name}.\nde.utf8=x\nes.utf8=Un {name}.\n", "utf-8")
        for suffix in spoken:
            (tmp_path / f"{name}{suffix}").touch()
    (tmp_path / "frog_mirror.png").touch()
    found = [(stamp.caption, stamp.language, stamp.audio is not None) for stamp in stamps.collect(tmp_path)]
    assert found == [
        ("A frog.", "en", True),
        ("Un frog.", "es", True),
        ("Un owl.", "es", True),
        ("A yak.", "en", False),
    ]


def test_stamps_without_apt_name_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"apt-get.*leave out --stamps"):
        stamps.build(tmp_path / "out", progress=False)
