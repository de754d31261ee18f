"""Captions to tokens, and a micro-batch's text arrays: placeholders, labels, segments.

A sample is one segment `<bos> <image>*i <audio>*a caption <eos>`. Captions are cut to the token limit before they come
here, so nothing here ever cuts a placeholder. The arrays are those that `shared.batch.batch_spec` documents.
"""

import codecs
import hashlib
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import tokenizers

from shared.batch import IGNORE, Group
from shared.errors import ConfigError, SampleError

Ints = npt.NDArray[np.int32]
SPECIALS = ("<pad>", "<bos>", "<eos>", "<image>", "<audio>")


class Codec(Protocol):
    """Texts to ids, and back; special tokens apart."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Tokenizer:
    """Caption tokens and the five special ids `pad bos eos image audio`. Make one with `Tokenizer.load`."""

    def __init__(self, codec: Codec, specials: Sequence[int], vocab_size: int, digest: str) -> None:
        self._codec, self._specials = codec, frozenset(specials)
        self.pad, self.bos, self.eos, self.image, self.audio = specials
        self.vocab_size, self.digest = vocab_size, digest

    @classmethod
    def load(cls, spec: str) -> "Tokenizer":
        """`bytes` (byte b is id 5 + b), or the path of a `tokenizers` JSON file that holds the five special tokens.

        Raises:
            ConfigError: the file cannot be read, is no tokenizer, or lacks a special token.
        """
        if spec == "bytes":
            return cls(_Bytes(), range(len(SPECIALS)), len(SPECIALS) + 256, "bytes-1")
        try:
            text = Path(spec).read_text(encoding="utf-8")
            model = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            rule = f"is no tokenizers JSON file ({error})"
            raise ConfigError("data.text.tokenizer", spec, rule, "give such a file, or `bytes`") from None
        ids = [_special(model, token, spec) for token in SPECIALS]
        vocab_size = max(model.get_vocab(with_added_tokens=True).values()) + 1
        return cls(_Json(model), ids, vocab_size, hashlib.sha256(text.encode()).hexdigest()[:16])

    def encode(self, text: str) -> list[int]:
        """Ids of a caption. Special tokens written out in it never become special ids."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each, in less time than one by one."""
        return list(map(self._plain, self._codec.encode(texts)))

    def _plain(self, ids: list[int]) -> list[int]:
        return ids if self._specials.isdisjoint(ids) else [i for i in ids if i not in self._specials]

    def count(self, text: str) -> int:
        """How many tokens `encode` gives."""
        return len(self.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, specials dropped."""
        return self._codec.decode([int(i) for i in ids if int(i) not in self._specials])


class _Bytes:
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[b + len(SPECIALS) for b in text.encode("utf-8", "replace")] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i - len(SPECIALS) for i in ids).decode("utf-8", "replace")


class _Json:
    def __init__(self, model: Any) -> None:
        self._model = model
        model.no_truncation()
        model.no_padding()
        model.encode_special_tokens = True

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Without the places of tokens in the text, which `encode_batch` would find too."""
        return [each.ids for each in self._model.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode(list(ids), skip_special_tokens=True))


def _special(model: Any, token: str, spec: str) -> int:
    found: int | None = model.token_to_id(token)
    if found is None:
        rule = f"lacks the special token {token}"
        raise ConfigError("data.text.tokenizer", spec, rule, f"train it with {' '.join(SPECIALS)}")
    return found


def caption(data: bytes, policy: Literal["replace", "reject"] = "replace") -> str:
    """A caption's text: UTF-8 with or without a byte-order mark, or UTF-16 with one.

    Bytes that do not decode become U+FFFD under 'replace'.

    Raises:
        SampleError: `bad_utf8`, under 'reject'.
    """
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return data.decode("utf-16" if wide else "utf-8-sig", "replace" if policy == "replace" else "strict")
    except UnicodeDecodeError as error:
        raise SampleError("bad_utf8", f"byte {error.start}: {error.reason}") from None


class Part(msgspec.Struct, frozen=True):
    """One sample of a micro-batch: its caption's ids, already cut, and how many tokens its clip fills."""

    caption: Sequence[int]
    audio_tokens: int = 0


def assemble(
    out: Mapping[str, npt.NDArray[Any]], parts: Sequence[Part], group: Group, tokenizer: Tokenizer
) -> tuple[int, int]:
    """Write the text arrays of one micro-batch; sample j of `parts` owns image slot j and clip slot j.

    `out` holds the arrays tokens_T, labels_T, positions_T, segments_T, features_T and cu_seqlens of the group. Label i
    is the token after i where that is a caption token or `<eos>`, else -100. Feature rows count the tokens of all N
    image slots, then those of all M clip slots at `group.clip_tokens` each.

    Returns:
        Tokens used and label tokens.

    Raises:
        ValueError: the parts do not fit the group; the plan never asks for that.
    """
    said = np.array([len(part.caption) + 1 for part in parts], np.int32)
    heard = np.array([part.audio_tokens for part in parts], np.int32)
    lengths = 1 + group.image_tokens + heard + said
    used = int(lengths.sum())
    if len(parts) > group.samples or used > group.tokens or int(heard.max(initial=0)) > group.clip_tokens:
        raise ValueError(f"{len(parts)} samples of {used} tokens do not fit group {group.name}")
    words = np.fromiter(chain.from_iterable((*part.caption, tokenizer.eos) for part in parts), np.int32)
    _blank(out, used, tokenizer)
    _write(out, words, said, heard, lengths, group, tokenizer)
    bounds = out["cu_seqlens"]
    bounds[0], bounds[len(parts) + 1 :] = 0, group.tokens
    bounds[1 : len(parts) + 1] = np.cumsum(lengths)
    return used, len(words)


def _blank(out: Mapping[str, npt.NDArray[Any]], used: int, tokenizer: Tokenizer) -> None:
    """What stands behind the samples, and wherever they have no label or feature."""
    tail = slice(used, None)
    out["tokens_T"][tail] = tokenizer.pad
    out["labels_T"][:] = IGNORE
    out["positions_T"][tail] = np.arange(len(out["positions_T"]) - used)
    out["segments_T"][tail] = 0
    out["features_T"][:] = -1


def _write(
    out: Mapping[str, npt.NDArray[Any]],
    words: Ints,
    said: Ints,
    heard: Ints,
    lengths: Ints,
    group: Group,
    tokenizer: Tokenizer,
) -> None:
    """All samples at once. Of S samples, int32 [S]: caption tokens with `<eos>`, audio tokens, all tokens. `words` are
    all captions, each with its `<eos>`.
    """
    images, slots = group.image_tokens, np.arange(len(lengths), dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    starts = ends - lengths
    audio_at, words_at = _runs(starts + 1 + images, heard), _runs(ends - said, said)
    names = ("tokens_T", "positions_T", "segments_T", "features_T")
    tokens, positions, segments, features = (out[name] for name in names)
    tokens[: lengths.sum()] = tokenizer.image
    tokens[starts], tokens[audio_at], tokens[words_at] = tokenizer.bos, tokenizer.audio, words
    out["labels_T"][words_at - 1] = words
    features[audio_at] = _runs(group.images * images + slots * group.clip_tokens, heard)
    ramp = np.arange(max(group.tokens, group.images * images), dtype=np.int32)
    for slot, start, end in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
        positions[start:end] = ramp[: end - start]
        segments[start:end] = slot + 1
        features[start + 1 : start + 1 + images] = ramp[slot * images : (slot + 1) * images]


def _runs(firsts: Ints, lengths: Ints) -> Ints:
    """firsts[0], firsts[0] + 1, ... (lengths[0] of them), then those from firsts[1] on, and so on. int32."""
    ends = np.cumsum(lengths, dtype=np.int32)
    steps = np.arange(ends[-1] if len(ends) else 0, dtype=np.int32)
    found: Ints = steps + np.repeat(firsts - (ends - lengths), lengths)
    return found
