"""From a block of raw records to token ids: a worker's job. Damaged records stop it, are left out, or are repaired.

A record is a text, or, with ``Recipe.chat``, a JSON object with a conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_port.core.errors import DataError, shortened
from megatron_port.ext.corpora.chat_tokens import ChatRecipe
from megatron_port.ext.corpora.conversations import ConversationRefusal
from megatron_port.ext.corpora.sources import BYTES, LINES, Block
from megatron_port.ext.corpora.tokenizer import NOTHING_ADDED, AddedIds, Tokenizer, encode_array
from megatron_port.ext.corpora.writer import outside

STOP, SKIP, REPAIR = POLICIES = ("stop", "skip", "repair")
EXAMPLES = 5
"""Damaged records of a block that are described."""


@dataclass(frozen=True)
class Recipe:
    """Settings of the conversion from text to tokens."""

    tokenizer: Tokenizer
    dtype: np.dtype
    key: str
    append_eod: bool
    bad_input: str
    """stop | skip (leave the record out) | repair (repair it where that can be done, otherwise leave it out)"""
    largest_record: int
    chat: ChatRecipe | None = None
    """Records are conversations, and tokens have a mask."""
    added: AddedIds = NOTHING_ADDED
    """Ids around each text, such as BOS. Conversations have what their template writes."""

    def around(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids before and after each document, the end of document included; conversations bring theirs."""
        before: tuple[int, ...] = ()
        after: tuple[int, ...] = ()
        if self.chat is None:
            end = self.tokenizer.eod_id
            before, after = self.added.before, self.added.after
            after = after[:-1] if after[-1:] == (end,) else after
            after = (*after, end) if self.append_eod else after
        return np.array(before, dtype=self.dtype), np.array(after, dtype=self.dtype)


@dataclass
class Encoded:
    """Encoded documents of a block."""

    lengths: np.ndarray
    """i32 [documents]"""
    data: bytes
    """Ids, in the file's type."""
    mask: bytes = b""
    """One byte per id, 1 where it counts as a label; empty: all do."""
    left_out: int = 0
    repaired: int = 0
    blank: int = 0
    """Documents of white space only."""
    notes: list[str] = field(default_factory=list)
    """The first damaged records, in words."""


class _Bad(Exception):
    """A record that cannot be used as it is; ``repaired``: what could be made of it."""

    def __init__(self, what: str, repaired: str | None = None) -> None:
        super().__init__(what)
        self.repaired = repaired


def encode_block(block: Block, recipe: Recipe) -> Encoded:
    """Tokenize a block. DataError: a damaged record (policy stop), or an id that the tokenizer may not give."""
    lengths: list[int] = []
    parts: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    out = Encoded(np.zeros(0, "<i4"), b"", left_out=len(block.dropped), notes=list(block.dropped[:EXAMPLES]))
    before, after = recipe.around()
    for where, ids, counted in _documents(block, recipe, out):
        wrong = outside(ids, recipe.tokenizer.vocab_size)
        if wrong:
            raise DataError(f"{where}: {wrong}; tokenizer {recipe.tokenizer.name} does not keep to its own vocabulary")
        if ids.size >= 2**31 - 1:
            raise DataError(f"{where}: {ids.size} tokens; a document holds at most 2^31 - 2")
        parts += [before, ids.astype(recipe.dtype), after]
        lengths.append(before.size + ids.size + after.size)
        if counted is not None:
            masks.append(counted)
    out.lengths = np.array(lengths, dtype="<i4")
    out.data = np.concatenate(parts).tobytes() if parts else b""
    out.mask = np.concatenate(masks).tobytes() if masks else b""
    return out


def _documents(block: Block, recipe: Recipe, out: Encoded) -> Iterator[tuple[str, np.ndarray, np.ndarray | None]]:
    """Yield (where, ids, which count): bool [n], or None for all."""
    if recipe.chat is None:
        for where, text in _usable(block, recipe, out):
            yield where, encode_array(recipe.tokenizer, text), None
        return
    for where, raw in _raw(block):
        try:
            made = recipe.chat.documents(_json(raw, recipe), append_eod=recipe.append_eod)
        except (ConversationRefusal, _Bad) as fault:
            if recipe.bad_input == STOP:
                raise DataError(f"{where}: {fault}. --bad-input skip leaves such records out") from None
            _note(out, f"{where}: {fault}", repaired=False)
            continue
        for ids, counted in made:
            yield where, ids, counted


def texts_of(block: Block, recipe: Recipe) -> Iterator[str]:
    """Return the texts of a block as they would be tokenized. Raises DataError at a damaged record (policy stop)."""
    for _, text in _usable(block, recipe, Encoded(np.zeros(0, "<i4"), b"")):
        yield text


def _usable(block: Block, recipe: Recipe, out: Encoded) -> Iterator[tuple[str, str]]:
    """Yield (where, text); what is left out or repaired is noted in ``out``."""
    for where, raw in _raw(block):
        damaged = False
        try:
            text = _json_text(raw, recipe) if block.kind == LINES else _decoded(raw)
        except _Bad as fault:
            if recipe.bad_input == STOP:
                hint = "repair it, leave such records out with --bad-input skip, or repair them with --bad-input repair"
                raise DataError(f"{where}: {fault}; {hint}") from None
            damaged = True
            text = fault.repaired or "" if recipe.bad_input == REPAIR else ""
            _note(out, f"{where}: {fault}", repaired=bool(text))
        if text and not text.isspace():
            yield where, text
        elif not damaged:
            out.blank += 1


def _note(out: Encoded, line: str, *, repaired: bool) -> None:
    if repaired:
        out.repaired += 1
    else:
        out.left_out += 1
    if len(out.notes) < EXAMPLES:
        out.notes.append(line)


def _raw(block: Block) -> Iterator[tuple[str, bytes | None]]:
    """Yield (where, bytes) of each record; None: a missing value."""
    return _lines(block) if block.kind == LINES else _texts(block)


def _lines(block: Block) -> Iterator[tuple[str, bytes]]:
    unit, number, _ = block.spans[0]
    for i, line in enumerate(block.payload.split(b"\n")):
        if line and not line.isspace():
            yield f"{unit}{number + i}", line


def _texts(block: Block) -> Iterator[tuple[str, bytes | None]]:
    at, record = 0, 0
    for unit, first, count in block.spans:
        begun = at
        for i, size in enumerate(block.sizes[record:record + count]):
            raw = None if size < 0 else block.payload[at:at + size]
            yield f"{unit}{first + (at - begun if unit.endswith(BYTES) else i)}", raw
            at += max(size, 0)
        record += count


def _decoded(raw: bytes | None) -> str:
    """A text's bytes. Raises _Bad."""
    if raw is None:
        raise _Bad("no text (null, or larger than --largest-record)")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Bad(f"byte {raw[error.start]:#04x} at {error.start} of the text is not UTF-8 (for a whole file: "
                   "iconv -f latin1 -t utf-8)", _without_nul(raw.decode("utf-8", errors="replace"))) from None
    return _clean(text)


def _clean(text: str) -> str:
    if "\0" in text:
        raise _Bad(f"a NUL character at {text.index(chr(0))} of the text; it is binary, or damaged", _without_nul(text))
    return text


def _without_nul(text: str) -> str:
    return text.replace("\0", "")


def _json(line: bytes | None, recipe: Recipe) -> Any:
    """The value of a JSON record. Raises _Bad."""
    if line is None:
        raise _Bad("larger than --largest-record")
    if len(line) > recipe.largest_record:
        raise _Bad(f"a line of {len(line)} bytes, more than {recipe.largest_record} (--largest-record)")
    try:
        return json.loads(line.removeprefix(b"\xef\xbb\xbf").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _Bad(f"byte {line[error.start]:#04x} at {error.start} of the line is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise _Bad(f"not a JSON object ({shortened(str(error), 120)})") from None


def _json_text(line: bytes | None, recipe: Recipe) -> str:
    """The text of a JSON line. Raises _Bad."""
    assert line is not None
    if len(line) > recipe.largest_record:
        raise _Bad(f"a line of {len(line)} bytes, more than {recipe.largest_record} (--largest-record)")
    broken = ""
    try:
        decoded = line.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        broken = f"byte {line[error.start]:#04x} at {error.start} of the line is not UTF-8"
        decoded = line.decode("utf-8", errors="replace")
    try:
        record = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        raise _Bad(broken or f"not a JSON object ({shortened(str(error), 120)})") from None
    text = record.get(recipe.key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise _Bad(f"no text under the key {recipe.key!r}; name the right one with --json-key")
    if broken:
        raise _Bad(broken, _without_nul(text))
    if b"\\u" in line:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            repaired = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            raise _Bad(f"half of a surrogate pair at character {error.start}", _without_nul(repaired)) from None
    return _clean(text)
