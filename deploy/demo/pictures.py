"""Crops of the photographs that scikit-image and scikit-learn ship, at many aspect ratios and sizes.

A `Crop` says everything about one stored picture; `describe`, `render` and `encode` follow from it alone.
"""

import functools
import importlib.util
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

from PIL import Image

from shared.errors import ConfigError

MIN_SIDE_PX, MAX_SIDE_PX = 96, 480
RATIO_JITTER = 0.05
MIN_ZOOM = 0.5
EXTENSIONS = ("jpg", "jpg", "png", "jpg", "jpg", "webp", "jpg", "jpg", "jpg", "jpg")
ROTATE_EVERY = 8  # one JPEG in so many is stored rotated
UPRIGHT = 1
ORIENTATIONS = (6, 3, 8, 2, 5, 4, 7)
ORIENTATION_TAG = 0x0112

# How to store an upright picture so that a reader which honours the EXIF orientation sees it upright again.
STORE_AS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@dataclass(frozen=True)
class Photo:
    """A photograph inside an installed package, and what it shows."""

    package: str
    path: str
    subject: str


@dataclass(frozen=True)
class Aspect:
    """A class of width/height ratios and the word for it."""

    name: str
    ratio: float
    word: str


@dataclass(frozen=True)
class Crop:
    """One picture: which part of which photograph, at what size, stored how."""

    photo: Photo
    aspect: Aspect
    box: tuple[int, int, int, int]
    size: tuple[int, int]
    extension: str
    orientation: int
    quality: int


PHOTOS = (
    Photo("skimage", "data/astronaut.png", "an astronaut in an orange suit"),
    Photo("skimage", "data/brick.png", "a wall of bricks"),
    Photo("skimage", "data/camera.png", "a man with a camera on a tripod"),
    Photo("skimage", "data/cell.png", "a cell under a microscope"),
    Photo("skimage", "data/chelsea.png", "the face of a cat"),
    Photo("skimage", "data/coffee.png", "a cup of coffee on a wooden table"),
    Photo("skimage", "data/coins.png", "old coins in rows"),
    Photo("skimage", "data/grass.png", "grass"),
    Photo("skimage", "data/gravel.png", "gravel stones"),
    Photo("skimage", "data/hubble_deep_field.jpg", "distant galaxies in the dark sky"),
    Photo("skimage", "data/ihc.png", "brown and blue tissue under a microscope"),
    Photo("skimage", "data/moon.png", "craters on the moon"),
    Photo("skimage", "data/motorcycle_left.png", "a red motorcycle in a garage"),
    Photo("skimage", "data/retina.jpg", "the retina of an eye"),
    Photo("skimage", "data/rocket.jpg", "a rocket on the launch pad at night"),
    Photo("sklearn", "datasets/images/china.jpg", "a temple above a lake in china"),
    Photo("sklearn", "datasets/images/flower.jpg", "an orange flower with green leaves"),
)

ASPECTS = (
    Aspect("1:1", 1 / 1, "square"),
    Aspect("4:3", 4 / 3, "landscape"),
    Aspect("16:9", 16 / 9, "wide"),
    Aspect("2:1", 2 / 1, "very wide"),
    Aspect("3:4", 3 / 4, "portrait"),
    Aspect("9:16", 9 / 16, "tall"),
    Aspect("1:2", 1 / 2, "very tall"),
)

DISTRIBUTIONS = {"skimage": "scikit-image", "sklearn": "scikit-learn"}

T = TypeVar("T")


def plan_crops(rng: Random) -> Iterator[Crop]:
    """An endless, varied and repeatable series of crops."""
    photos, aspects = _cycle(PHOTOS, rng), _cycle(ASPECTS, rng)
    extensions, orientations = _cycle(EXTENSIONS, rng), _orientations()
    while True:
        photo, aspect, extension = next(photos), next(aspects), next(extensions)
        box = _choose_box(rng, load(photo).size, aspect.ratio * (1 + rng.uniform(-RATIO_JITTER, RATIO_JITTER)))
        size = _choose_size(rng, box[2] - box[0], box[3] - box[1])
        orientation = next(orientations) if extension == "jpg" else UPRIGHT
        yield Crop(photo, aspect, box, size, extension, orientation, quality=rng.randint(80, 95))


def describe(crop: Crop) -> str:
    """The caption: shape, colour, subject, place within the photograph."""
    photo = load(crop.photo)
    colour = "black and white " if photo.mode == "L" else ""
    place = _place(crop.box, photo.size)
    return f"a {crop.aspect.word} {colour}photo of {crop.photo.subject}" + (f", {place} part" if place else "")


def render(crop: Crop) -> Image.Image:
    """The upright picture."""
    return load(crop.photo).resize(crop.size, Image.Resampling.LANCZOS, box=crop.box)


def encode(crop: Crop) -> bytes:
    """The picture file; a rotated JPEG carries the EXIF orientation that turns it upright."""
    picture, stream = render(crop), io.BytesIO()
    if crop.extension == "png":
        picture.save(stream, "PNG")
    elif crop.extension == "webp":
        picture.save(stream, "WEBP", quality=crop.quality)
    elif crop.orientation == UPRIGHT:
        picture.save(stream, "JPEG", quality=crop.quality)
    else:
        stored = picture.transpose(STORE_AS[crop.orientation])
        stored.save(stream, "JPEG", quality=crop.quality, exif=_exif(crop.orientation))
    return stream.getvalue()


@functools.cache
def load(photo: Photo) -> Image.Image:
    """A whole photograph, decoded: grey (L) or RGB. Shared between callers: do not write to it."""
    path = _package_dir(photo.package) / photo.path
    try:
        with Image.open(path) as picture:
            return picture.convert("L" if picture.mode == "L" else "RGB")
    except OSError as error:
        remedy = f"install it again: pip install --force-reinstall {DISTRIBUTIONS[photo.package]}"
        raise ConfigError("photograph", path, f"must be readable ({error})", remedy) from error


def _package_dir(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        remedy = f"run: pip install {DISTRIBUTIONS[package]}"
        raise ConfigError("package", package, "must be installed, its photographs are the pictures", remedy)
    return Path(spec.origin).parent


def _cycle(items: Sequence[T], rng: Random) -> Iterator[T]:
    """All of `items` in a random order, then again in another order, and so on."""
    while True:
        yield from rng.sample(items, len(items))


def _orientations() -> Iterator[int]:
    while True:
        for orientation in ORIENTATIONS:
            yield from [UPRIGHT] * (ROTATE_EVERY - 1)
            yield orientation


def _choose_box(rng: Random, photo_size: tuple[int, int], ratio: float) -> tuple[int, int, int, int]:
    """A random box of the given width/height ratio, both sides at least MIN_SIDE_PX."""
    photo_width, photo_height = photo_size
    full_width = min(photo_width, photo_height * ratio)
    full_height = full_width / ratio
    zoom = rng.uniform(max(MIN_ZOOM, MIN_SIDE_PX / min(full_width, full_height)), 1)
    width, height = round(full_width * zoom), round(full_height * zoom)
    left, top = rng.randint(0, photo_width - width), rng.randint(0, photo_height - height)
    return left, top, left + width, top + height


def _choose_size(rng: Random, width: int, height: int) -> tuple[int, int]:
    """A size of the same shape within the side limits, never larger than the box."""
    scale = rng.uniform(MIN_SIDE_PX / min(width, height), min(1, MAX_SIDE_PX / max(width, height)))
    return max(MIN_SIDE_PX, round(width * scale)), max(MIN_SIDE_PX, round(height * scale))


def _place(box: tuple[int, int, int, int], photo_size: tuple[int, int]) -> str:
    """Where the box lies: "upper left", "right", "middle"; empty where it is nearly the whole photograph."""
    left, top, right, bottom = box
    free_x, free_y = photo_size[0] - (right - left), photo_size[1] - (bottom - top)
    if free_x < 0.12 * photo_size[0] and free_y < 0.12 * photo_size[1]:
        return ""
    row = _third(top, free_y, photo_size[1], ("upper", "", "lower"))
    column = _third(left, free_x, photo_size[0], ("left", "", "right"))
    return " ".join(word for word in (row, column) if word) or "middle"


def _third(offset: int, free: int, side: int, words: tuple[str, str, str]) -> str:
    return words[1] if free < 0.12 * side else words[min(2, 3 * offset // free)]


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = orientation
    return exif
