"""Seeded damage: to the bytes of a file, of a tar, and to messages of the wire protocol. `tried` counts its kinds."""

import random
import struct
from collections import Counter
from collections.abc import Callable

import msgspec

from shared import wire
from shared.batch import Cursor
from tests.support.media import photo, tone

Bytes = Callable[[bytearray, random.Random], bytearray]

NASTY = (0, 1, 127, 128, 255)
WORDS = (0, 1, -1, 0x7FFFFFFF, 0x80000000 - (1 << 32), 0xFFFF)
NUMBERS = (0, 1, -1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64 - 1)
BLOCK = 512


def flip(data: bytearray, rng: random.Random) -> bytearray:
    """A few bytes, early ones more often: headers lie there."""
    for _ in range(rng.choice((1, 2, 8, 40))):
        at = int(len(data) * rng.random() ** rng.choice((1, 6)))
        data[min(at, len(data) - 1)] = rng.choice((*NASTY, rng.randrange(256)))
    return data


def cut(data: bytearray, rng: random.Random) -> bytearray:
    return data[: rng.randrange(len(data))]


def splice(data: bytearray, rng: random.Random) -> bytearray:
    """A run of bytes copied over, inserted at or taken from a place."""
    a, b, size = rng.randrange(len(data)), rng.randrange(len(data)), rng.choice((1, 4, 64, 1000))
    return data[:a] + data[b : b + size] + data[a + rng.choice((0, size)) :]


def word(data: bytearray, rng: random.Random) -> bytearray:
    """A four-byte number of either endianness set to a limit: sizes, counts, rates."""
    at = int(len(data) * rng.random() ** 6)
    data[at : at + 4] = struct.pack(rng.choice("<>") + "i", rng.choice(WORDS))
    return data


def trail(data: bytearray, rng: random.Random) -> bytearray:
    return data + rng.randbytes(rng.choice((1, 100, 5000)))


def tar_block(data: bytearray, rng: random.Random) -> bytearray:
    """A block of a tar emptied, doubled, made noise or moved."""
    at = rng.randrange(len(data) // BLOCK) * BLOCK
    block = data[at : at + BLOCK]
    new = rng.choice((bytes(BLOCK), block + block, rng.randbytes(BLOCK), b""))
    return data[:at] + bytearray(new) + data[at + BLOCK :]


FILE: tuple[Bytes, ...] = (flip, cut, splice, word, trail)
TAR: tuple[Bytes, ...] = (flip, cut, splice, tar_block, tar_block)


def mutated(data: bytes, rng: random.Random, ways: tuple[Bytes, ...], tried: Counter[str]) -> bytes:
    """One to three kinds of damage."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if out:
            way = rng.choice(ways)
            out = way(out, rng)
            tried[way.__name__] += 1
    return bytes(out)


def media(rng: random.Random) -> tuple[str, bytes]:
    """A small good picture or clip of any format, with its field."""
    field = rng.choice(("jpg", "jpg", "png", "webp", "wav", "flac", "ogg", "mp3"))
    if field in ("wav", "flac", "ogg", "mp3"):
        return field, tone(
            rng.uniform(0.1, 0.6), rng.choice((8000, 16_000, 44_100)), rng.choice((1, 2)), form=field.upper()
        )
    form = {"jpg": "JPEG"}.get(field, field.upper())
    width, height = rng.choice(((64, 64), (300, 200), (90, 160)))
    return field, photo(width, height, rng.randrange(1000), form, rng.choice((1, 1, 6, 8)))


def frames(rng: random.Random, hello: wire.Hello, tried: Counter[str]) -> list[bytes]:
    """One message that no honest reader sends: noise, a damaged message, or a well-formed one full of lies."""
    kind = rng.choice(("noise", "many frames", "damaged message", "unknown message", "lie", "lie"))
    tried[kind] += 1
    if kind == "noise":
        return [rng.randbytes(rng.choice((0, 1, 3, 60, 5000)))]
    if kind == "many frames":
        return [wire.encode(_lie(rng, hello)) for _ in range(rng.choice((2, 3)))]
    if kind == "damaged message":
        return [mutated(wire.encode(_lie(rng, hello)), rng, FILE, tried)]
    if kind == "unknown message":
        unknown = {"type": rng.choice(("Hello", "Credit", "Batch", "x")), "count": rng.choice(NUMBERS)}
        return [msgspec.msgpack.encode(unknown)]
    return [wire.encode(_lie(rng, hello))]


def _lie(rng: random.Random, hello: wire.Hello) -> wire.Message:
    cursor = Cursor(*(rng.choice((0, 1, *NUMBERS[:-1])) for _ in range(3)))
    lies = {
        "cursor": cursor,
        "data_rank": rng.choice(NUMBERS[:-1]),
        "data_ranks": rng.choice((0, 1, 2, 2**40)),
        "reader": rng.choice((0, 5, -1)),
        "readers": rng.choice((1, 2, 2**62)),
        "job": rng.choice(("", "other", "\0", "x" * 5000)),
        "protocol": rng.choice((0, 1, 2, 99)),
        "digest": rng.choice(("", "ffff")),
        "lane": rng.choice(("slots", "tcp", "cuda", "carrier pigeon")),
        "device": rng.choice(("", "GPU-none")),
    }
    told = {name: lies[name] for name in rng.sample(sorted(lies), rng.choice((1, 2, 4)))}
    return rng.choice(
        (
            msgspec.structs.replace(hello, **told),
            wire.Credit(rng.choice(NUMBERS[:-1])),
            wire.Release(cursor),
            wire.Lend(rng.randbytes(rng.choice((0, 64))), rng.choice(NUMBERS[:-1]), rng.choice(NUMBERS[:-1])),
            wire.Heartbeat(),
            wire.Bye(),
        )
    )
