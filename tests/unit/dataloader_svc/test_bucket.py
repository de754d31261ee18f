"""From facts to groups, lengths and padding shares."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from dataloader_svc.bucket import Columns, assign, clip_tokens, nearest, padding_share, sample_tokens
from shared.batch import Bucket, buckets, groups
from shared.sections import AudioSection, ImageSection
from tests.support.columns import columns, pictures
from tests.support.tars import data_section


def nearest_bucket(height: int, width: int, choices: Sequence[Bucket]) -> int:
    return int(nearest(np.array([height]), np.array([width]), choices)[0])


def test_the_nearest_bucket_is_nearest_by_log_ratio() -> None:
    choices = buckets(ImageSection(pixel_budget=256 * 256))
    for height in range(20, 400, 7):
        for width in range(20, 400, 11):
            miss = [abs(math.log(width / height) - b.log_ratio) for b in choices]
            found = nearest_bucket(height, width, choices)
            assert miss[found] <= min(miss) + 1e-9


def test_a_tie_goes_to_the_earlier_bucket() -> None:
    wide, tall = Bucket(32, 64), Bucket(64, 32)
    assert nearest_bucket(50, 50, [wide, tall]) == nearest_bucket(50, 50, [tall, wide]) == 0


def test_portrait_and_landscape_mirror_each_other() -> None:
    choices = [Bucket(64, 64), Bucket(48, 80), Bucket(80, 48)]
    assert [nearest_bucket(*size, choices) for size in ((100, 100), (100, 170), (170, 100))] == [0, 1, 2]


def test_every_group_is_the_sample_s_own() -> None:
    data = data_section(audio=AudioSection(classes_s=(1.0, 3.0)))
    facts = columns(3000, bad_share=0.1)
    table, choices = groups(data), buckets(data.image)
    for i, group_id in enumerate(assign(facts, data).tolist()):
        if facts.verdict[i]:
            assert group_id == -1
            continue
        group = table[group_id]
        clip = int(facts.clip_samples[i])
        assert (group.bucket is None) == (facts.height[i] == 0)
        if group.bucket:
            assert group.bucket == choices[nearest_bucket(int(facts.height[i]), int(facts.width[i]), choices)]
        assert group.clip_samples == (0 if not clip else 16_000 if clip <= 16_000 else 48_000)


def test_clips_at_a_class_limit_stay_in_it_and_longer_ones_go_to_the_largest() -> None:
    data = data_section(audio=AudioSection(classes_s=(1.0, 3.0)))
    clips = np.array([0, 1, 16_000, 16_001, 48_000, 48_001, 10**7])
    none = np.zeros(7, np.uint32)
    facts = Columns(none, none, clips, none, none.astype(np.uint8))
    lengths = [groups(data)[g].clip_samples for g in assign(facts, data)]
    assert lengths == [0, 16_000, 16_000, 48_000, 48_000, 48_000, 48_000]


def test_tokens_count_bos_image_audio_caption_eos() -> None:
    data = data_section(audio=AudioSection(classes_s=(1.0,), samples_per_token=1600))
    group = next(g for g in groups(data) if g.bucket and g.clip_samples)
    clips, text = np.array([1, 1600, 1601, 16_000, 90_000]), np.array([0, 1, 2, 3, 4], np.uint32)
    assert clip_tokens(group, clips, data.audio).tolist() == [1, 1, 2, 10, 10]
    expected = [2 + group.image_tokens + a + t for a, t in ((1, 0), (1, 1), (2, 2), (10, 3), (10, 4))]
    assert sample_tokens(group, clips, text, data.audio).tolist() == expected


def test_padding_shares_follow_the_stated_formulas() -> None:
    data = data_section(image=ImageSection(pixel_budget=64 * 64))
    facts = pictures((64, 64), (32, 128), (128, 32), (64, 64))
    ids, sizes = np.arange(4), np.array([3, 1])
    group_of = assign(facts, data)
    share = padding_share(facts, group_of, ids, sizes, 5, data)
    real = 4 * (2 + 16 + 4)
    padded = 3 * (2 + 8 * 8 + 4) + 1 * (2 + 16 + 4)
    assert share.naive == pytest.approx(1 - real / padded)
    bucketed = sum(2 + groups(data)[g].image_tokens + 4 for g in group_of)
    assert share.bucketed == pytest.approx(1 - bucketed / (5 * data.batch.tokens))


def test_padding_of_nothing_is_nothing() -> None:
    data, none = data_section(), np.zeros(0, np.int64)
    empty = Columns(none, none, none, none, none)
    assert msgspec.structs.astuple(padding_share(empty, none, none, none, 0, data)) == (0.0, 0.0)
