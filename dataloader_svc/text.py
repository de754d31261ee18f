"""Captions to tokens, and a micro-batch's text arrays: placeholders, labels, segments.

A sample is one segment `<bos> <image>*i <audio>*a caption <eos>`. Captions are cut to the token limit before they come
here, so nothing here ever cuts a placeholder. The arrays are those that `shared.batch.batch_spec` documents.
"""

import codecs
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import tokenizers

from shared.batch import IGNORE, Group
from shared.errors import ConfigError, SampleError

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
        return [[i for i in ids if i not in self._specials] for ids in self._codec.encode(texts)]

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
    ends = np.cumsum([0, *(_length(part, group) for part in parts)])
    used = int(ends[-1])
    if len(parts) > group.samples or used > group.tokens or any(p.audio_tokens > group.clip_tokens for p in parts):
        raise ValueError(f"{len(parts)} samples of {used} tokens do not fit group {group.name}")
    _blank(out, used, tokenizer)
    for slot, part in enumerate(parts):
        _write(out, slice(int(ends[slot]), int(ends[slot + 1])), slot, part, group, tokenizer)
    bounds = out["cu_seqlens"]
    bounds[: len(ends)] = ends
    bounds[len(ends) :] = group.tokens
    return used, sum(len(part.caption) + 1 for part in parts)


def _length(part: Part, group: Group) -> int:
    return 1 + group.image_tokens + part.audio_tokens + len(part.caption) + 1


def _blank(out: Mapping[str, npt.NDArray[Any]], used: int, tokenizer: Tokenizer) -> None:
    tail = slice(used, None)
    out["tokens_T"][tail] = tokenizer.pad
    out["labels_T"][tail] = IGNORE
    out["positions_T"][tail] = np.arange(len(out["positions_T"]) - used)
    out["segments_T"][tail] = 0
    out["features_T"][tail] = -1


def _write(
    out: Mapping[str, npt.NDArray[Any]], at: slice, slot: int, part: Part, group: Group, tokenizer: Tokenizer
) -> None:
    images, audio = group.image_tokens, part.audio_tokens
    head = 1 + images + audio
    first_clip_row = group.images * images + slot * group.clip_tokens
    tokens, labels, features = (out[name][at] for name in ("tokens_T", "labels_T", "features_T"))
    tokens[0], tokens[-1] = tokenizer.bos, tokenizer.eos
    tokens[1 : 1 + images], tokens[1 + images : head] = tokenizer.image, tokenizer.audio
    tokens[head:-1] = part.caption
    labels[: head - 1], labels[-1] = IGNORE, IGNORE
    labels[head - 1 : -1] = tokens[head:]
    out["positions_T"][at] = np.arange(len(tokens))
    out["segments_T"][at] = slot + 1
    features[:] = -1
    features[1 : 1 + images] = np.arange(slot * images, (slot + 1) * images)
    features[1 + images : head] = np.arange(first_clip_row, first_clip_row + audio)
