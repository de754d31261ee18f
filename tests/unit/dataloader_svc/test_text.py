"""Captions to tokens and a micro-batch's text arrays."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataloader_svc.text import SPECIALS, Part, Tokenizer, assemble, caption
from shared.batch import IGNORE, Group, batch_spec, groups
from shared.errors import ConfigError, SampleError
from shared.sections import BatchSection, TextSection
from tests.support.tars import data_section, trained


@pytest.fixture(params=["bytes", "json"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return Tokenizer.load("bytes" if request.param == "bytes" else trained(tmp_path / "t.json"))


# --- tokens ---


def test_bytes_are_ids_after_the_specials() -> None:
    tokenizer = Tokenizer.load("bytes")
    assert tokenizer.encode("aé") == [5 + 97, 5 + 0xC3, 5 + 0xA9]
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos, tokenizer.image, tokenizer.audio) == (0, 1, 2, 3, 4)
    assert tokenizer.vocab_size == 261


def test_captions_come_back_whole(tokenizer: Tokenizer) -> None:
    for text in ("", "a street with a car by the sea, the car", "né ü 東京 \U0001f600", "two  spaces\n"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode([tokenizer.bos, *ids, tokenizer.eos]) == text
        assert tokenizer.count(text) == len(ids)
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_placeholders_written_in_a_caption_stay_text(tokenizer: Tokenizer) -> None:
    text = "an <image> of <audio> and <pad><eos>"
    ids = tokenizer.encode(text)
    assert not set(ids) & {tokenizer.pad, tokenizer.bos, tokenizer.eos, tokenizer.image, tokenizer.audio}
    assert tokenizer.decode(ids) == text


def test_captions_together_give_the_ids_that_each_gives_alone(tokenizer: Tokenizer) -> None:
    captions = ["", "a red kite over the sea", "ümlaut, 東京, \U0001f600", "<image> written out <pad>", "red " * 500]
    together = tokenizer.encode_all(captions)
    assert together == [tokenizer.encode(caption) for caption in captions]
    assert [len(ids) for ids in together] == [tokenizer.count(caption) for caption in captions]
    assert together[0] == tokenizer.encode_all([""])[0] == []
    assert tokenizer.encode_all([]) == []


def test_a_tokenizer_without_placeholders_is_refused_by_name(tmp_path: Path) -> None:
    spec = trained(tmp_path / "t.json", SPECIALS[:4])
    with pytest.raises(ConfigError, match="lacks the special token <audio>"):
        Tokenizer.load(spec)
    (tmp_path / "junk.json").write_text("{}")
    for bad in (str(tmp_path / "junk.json"), str(tmp_path / "absent.json")):
        with pytest.raises(ConfigError, match=r"data\.text\.tokenizer"):
            Tokenizer.load(bad)


def test_digests_tell_tokenizers_apart(tmp_path: Path) -> None:
    digest = Tokenizer.load(trained(tmp_path / "a.json")).digest
    assert digest != Tokenizer.load("bytes").digest
    assert digest == Tokenizer.load(str(tmp_path / "a.json")).digest


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"plain", "plain"),
        ("né".encode(), "né"),
        (b"\xef\xbb\xbfwith mark", "with mark"),
        (b"\xff\xfeh\x00i\x00", "hi"),
        (b"\xfe\xff\x00h\x00i", "hi"),
        (b"", ""),
    ],
)
def test_unicode_captions_are_read_under_both_policies(data: bytes, text: str) -> None:
    assert caption(data, "replace") == caption(data, "reject") == text


@pytest.mark.parametrize("data", [b"caf\xe9", b"it\x92s", b"\xff\xfeh\x00i"])
def test_bad_bytes_are_replaced_or_rejected_by_policy(data: bytes) -> None:
    assert "\ufffd" in caption(data, "replace")
    with pytest.raises(SampleError) as caught:
        caption(data, "reject")
    assert caught.value.reason == "bad_utf8"


# --- assembly ---


def small_group(image: bool = True, audio: bool = True) -> Group:
    data = data_section(batch=BatchSection(tokens=128), text=TextSection(expected_tokens=8, max_tokens=16))
    return next(g for g in groups(data) if bool(g.bucket) == image and bool(g.clip_samples) == audio)


def blank(group: Group) -> dict[str, np.ndarray[Any, Any]]:
    fields = batch_spec(group).fields[:6]
    return {f.name: np.full(f.shape, 77, f.dtype) for f in fields}


def test_one_sample_stands_as_documented() -> None:
    tokenizer, group = Tokenizer.load("bytes"), small_group()
    out = blank(group)
    images = group.image_tokens
    used, labels = assemble(out, [Part([100, 101], 2)], group, tokenizer)
    assert (used, labels) == (1 + images + 2 + 2 + 1, 3)
    tokens = [1, *[3] * images, 4, 4, 100, 101, 2]
    assert out["tokens_T"].tolist() == [*tokens, *[0] * (128 - used)]
    assert out["labels_T"].tolist() == [IGNORE] * (images + 2) + [100, 101, 2] + [IGNORE] * (129 - used)
    assert out["positions_T"].tolist() == [*range(used), *range(128 - used)]
    assert out["segments_T"].tolist() == [1] * used + [0] * (128 - used)
    clip_row = group.images * images
    features = [-1, *range(images), clip_row, clip_row + 1, -1, -1, -1]
    assert out["features_T"].tolist() == [*features, *[-1] * (128 - used)]
    assert out["cu_seqlens"].tolist() == [0, used] + [128] * group.samples


def test_sample_j_owns_slot_j_of_images_and_clips() -> None:
    data = data_section(batch=BatchSection(tokens=256), text=TextSection(expected_tokens=8, max_tokens=16))
    group = next(g for g in groups(data) if g.bucket and g.clip_samples)
    assert group.samples >= 3
    tokenizer, out = Tokenizer.load("bytes"), blank(group)
    parts = [Part([100], 1), Part([], 3), Part([101, 102, 103], 2)]
    used, labels = assemble(out, parts, group, tokenizer)
    assert labels == 2 + 1 + 4
    for slot, part in enumerate(parts):
        rows = out["features_T"][(out["segments_T"] == slot + 1) & (out["features_T"] >= 0)].tolist()
        first = group.images * group.image_tokens + slot * group.clip_tokens
        pixels = [*range(slot * group.image_tokens, (slot + 1) * group.image_tokens)]
        assert rows == [*pixels, *range(first, first + part.audio_tokens)]
    ends = out["cu_seqlens"][: len(parts) + 1]
    assert ends[-1] == used
    assert [out["positions_T"][e] for e in ends[:-1]] == [0, 0, 0]
    placed = int((out["tokens_T"] == tokenizer.image).sum())
    assert placed == 3 * group.image_tokens


def test_labels_are_the_next_token_of_the_same_sample_everywhere() -> None:
    tokenizer, group = Tokenizer.load("bytes"), small_group(image=False)
    out = blank(group)
    assemble(out, [Part([50, 60], 3), Part([], 1)], group, tokenizer)
    tokens, labels, segments = out["tokens_T"], out["labels_T"], out["segments_T"]
    marked = np.flatnonzero(labels != IGNORE)
    assert (labels[marked] == tokens[marked + 1]).all()
    assert (segments[marked] == segments[marked + 1]).all()
    assert sorted(labels[marked].tolist()) == [2, 2, 50, 60]


def test_an_empty_micro_batch_is_all_padding() -> None:
    tokenizer, group = Tokenizer.load("bytes"), small_group()
    out = blank(group)
    assert assemble(out, [], group, tokenizer) == (0, 0)
    assert set(out["tokens_T"].tolist()) == {0}
    assert set(out["labels_T"].tolist()) == {IGNORE}
    assert out["cu_seqlens"].tolist() == [0] + [128] * (group.samples + 1)


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    tokenizer, group = Tokenizer.load("bytes"), small_group(image=False, audio=False)
    for parts in ([Part([9] * 127)], [Part([9])] * (group.samples + 1), [Part([9], 1)]):
        out = blank(group)
        with pytest.raises(ValueError, match="do not fit group text"):
            assemble(out, parts, group, tokenizer)
        assert (out["tokens_T"] == 77).all()


def test_a_full_micro_batch_has_no_padding() -> None:
    tokenizer, group = Tokenizer.load("bytes"), small_group(image=False, audio=False)
    out = blank(group)
    assert assemble(out, [Part([9] * 126)], group, tokenizer) == (128, 127)
    assert out["cu_seqlens"].tolist() == [0] + [128] * (group.samples + 1)
    assert (out["segments_T"] == 1).all()
