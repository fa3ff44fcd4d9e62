"""The interface of a tokenizer, and the base classes of those that call another library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class Tokenizer(Protocol):
    """Text to ids and back. ``eod_id`` ends a document and never comes out of ``encode``."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eod_id(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


def encode_array(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Ids of ``text``, integers [n], by the tokenizer's own short way where it has one."""
    direct = getattr(tokenizer, "encode_array", None)
    return direct(text) if direct else np.asarray(tokenizer.encode(text), dtype=np.int64)


@dataclass(frozen=True)
class AddedIds:
    """Ids that a tokenizer's own post-processor puts around a text, such as BOS."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


NOTHING_ADDED = AddedIds()


def added_ids(tokenizer: Tokenizer) -> AddedIds:
    """Return what the tokenizer adds to a text; most byte-level ones add nothing."""
    found = getattr(tokenizer, "added", None)
    return found if isinstance(found, AddedIds) else NOTHING_ADDED


def encode_whole(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text with what the tokenizer adds: those of ``tokenizer(text)`` in transformers."""
    added = added_ids(tokenizer)
    return [*added.before, *tokenizer.encode(text), *added.after]


def bos_of(tokenizer: Tokenizer) -> int:
    """Return the id that begins a text, -1: none. A tokenizer may have one that it does not add by itself."""
    before = added_ids(tokenizer).before
    return int(getattr(tokenizer, "bos_id", before[0] if before else -1))


@dataclass(frozen=True)
class Spans:
    """Ids of a text whose special pieces were read as such, and the characters that each stands for."""

    ids: np.ndarray
    """i64 [n]"""
    first: np.ndarray
    """i64 [n], the first character of each"""
    end: np.ndarray
    """i64 [n], the one after its last. Of ids that share a character's bytes, at least the last has that character."""

    @classmethod
    def of_bytes(cls, text: str, ids: Sequence[int], sizes: Sequence[int]) -> Spans:
        """Ids that stand for so many bytes of the text each, in order."""
        leads = (np.frombuffer(text.encode("utf-8"), dtype=np.uint8) & 0xC0) != 0x80
        leads = np.append(leads, True)  # the end of the text
        character = np.cumsum(leads) - 1
        after = np.cumsum(np.asarray(sizes, dtype=np.int64))
        return cls(np.asarray(ids, dtype=np.int64), character[after - np.asarray(sizes, dtype=np.int64)],
                   character[after] + ~leads[after])


class LibraryTokenizer:
    """A tokenizer of another library, by its functions. Special pieces in a text are text."""

    _encode: Callable[[str], list[int]]
    _decode: Callable[[list[int]], str]
    eod_id: int

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text."""
        return self._encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """End-of-document ids are left out."""
        return self._decode([int(i) for i in ids if int(i) != self.eod_id])


class BytePairTokenizer(LibraryTokenizer):
    """A tokenizer by one of tiktoken's encodings."""

    def __init__(self, encoding: Any) -> None:
        self._encoding, self._encode, self._decode = encoding, encoding.encode_ordinary, encoding.decode
        self.special: Mapping[str, int] = dict(encoding._special_tokens)

    def encode_array(self, text: str) -> np.ndarray:
        """Return ids of plain text, u32 [n], without a Python object for each id."""
        found: np.ndarray = self._encoding.encode_to_numpy(text, disallowed_special=())
        return found

    def encode_spans(self, text: str) -> Spans:
        """Return ids of a text with special pieces."""
        ids = self._encoding.encode(text, allowed_special="all")
        return Spans.of_bytes(text, ids, [len(piece) for piece in self._encoding.decode_tokens_bytes(ids)])
