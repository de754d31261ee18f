"""Buckets, groups and layouts follow from the data section alone."""

import numpy as np
import pytest

from shared.batch import ALIGN, Bucket, Cursor, batch_spec, buckets, fit_bucket, groups
from shared.sections import AudioSection, BatchSection, DataSection, DatasetSection, ImageSection, TextSection

DATA = DataSection(datasets=(DatasetSection(name="a", shards=("a.tar",)),))


@pytest.mark.parametrize(
    ("patch", "merge", "align", "budget"), [(16, 1, 1, 128**2), (14, 2, 1, 336**2), (16, 2, 3, 1024**2)]
)
def test_every_bucket_is_on_the_lcm_under_the_budget_and_near_its_ratio(
    patch: int, merge: int, align: int, budget: int
) -> None:
    image = ImageSection(patch=patch, merge=merge, align=align, pixel_budget=budget)
    found = buckets(image)
    assert len(found) == 7
    for bucket in found:
        assert bucket.height % image.multiple == bucket.width % image.multiple == 0
        assert bucket.height * bucket.width <= budget
    assert found[0].height == found[0].width


def test_portrait_buckets_mirror_landscape_ones() -> None:
    shapes = {(b.height, b.width) for b in buckets(ImageSection(pixel_budget=512**2))}
    assert shapes == {(w, h) for h, w in shapes}


@pytest.mark.parametrize("ratio", [0.01, 0.5, 1.0, 1.78, 30.0])
def test_a_bucket_is_found_for_any_ratio(ratio: float) -> None:
    bucket = fit_bucket(ratio, 128**2, 16)
    assert bucket.height >= 16 and bucket.width >= 16


def test_group_ids_are_places_and_hold_every_pair() -> None:
    found = groups(DATA)
    assert [g.id for g in found] == list(range(len(found)))
    assert len({g.name for g in found}) == len(found) == (7 + 1) * (3 + 1)
    assert (found[0].images, found[0].clips) == (0, 0)


def test_a_group_holds_at_least_one_sample_and_its_tokens_fit() -> None:
    small = DataSection(
        datasets=DATA.datasets,
        image=ImageSection(pixel_budget=64**2),
        audio=AudioSection(classes_s=(1.6,)),
        text=TextSection(max_tokens=100),
        batch=BatchSection(tokens=192),
    )
    for group in groups(small):
        assert group.samples >= 1
        assert group.images in (0, group.samples) and group.clips in (0, group.samples)


def test_fields_are_aligned_apart_and_inside_the_size() -> None:
    for group in groups(DATA):
        spec = batch_spec(group)
        end = 0
        for field in spec.fields:
            assert field.offset % ALIGN == 0 and field.offset >= end
            assert field.size_bytes == int(np.prod(field.shape)) * np.dtype(field.dtype).itemsize
            end = field.offset + field.size_bytes
        assert end <= spec.size_bytes


def test_cursors_order_by_epoch_then_step_then_micro() -> None:
    assert sorted([Cursor(1, 0, 0), Cursor(0, 5, 1), Cursor(0, 5, 0)]) == [
        Cursor(0, 5, 0),
        Cursor(0, 5, 1),
        Cursor(1, 0, 0),
    ]


def test_explicit_buckets_win() -> None:
    assert buckets(ImageSection(buckets=((32, 64),))) == (Bucket(32, 64),)
