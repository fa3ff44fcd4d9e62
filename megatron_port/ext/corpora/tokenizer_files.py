"""Tokenizers of other libraries: Hugging Face's tokenizer.json, SentencePiece, tiktoken's named encodings."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_port.core.errors import DataError, shortened
from megatron_port.ext.corpora.extras import need
from megatron_port.ext.corpora.tokenizer_base import AddedIds, BytePairTokenizer, LibraryTokenizer, Spans, Tokenizer

LARGEST_FILE = 256 << 20
END_PIECES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")
"""Looked for, in this order, where no file says which piece ends a document."""


def load(kind: str, rest: str, *, directory: str | Path | None = None, eod: str = "") -> Tokenizer:
    """Load a tokenizer. ``kind``: hf | sentencepiece | tiktoken; ``rest`` may end in ``#PIECE`` (end of document).

    Raises DataError.
    """
    if "#" in rest and not Path(rest).exists():
        rest, _, piece = rest.rpartition("#")
        eod = eod or piece
    if kind == "tiktoken":
        return TiktokenTokenizer(rest, directory=directory, eod=eod)
    return (HFTokenizer if kind == "hf" else SentencePieceTokenizer)(Path(rest), eod=eod)


def content_hash(data: bytes, eod_id: int) -> str:
    """Return the hash of a one-file tokenizer: sha256 over its bytes and the end-of-document id."""
    return hashlib.sha256(data + f"\0{eod_id}".encode()).hexdigest()


def read_file(path: Path) -> tuple[Path, bytes]:
    """Return (path, content). DataError: it cannot be read, or is larger than any tokenizer."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise DataError(f"{path}: {path.stat().st_size} bytes; a tokenizer has at most {LARGEST_FILE}")
        return path, path.read_bytes()
    except OSError as error:
        raise DataError(f"tokenizer {path}: cannot be read ({error.strerror})") from error


def settings_beside(path: Path) -> dict[str, Any]:
    """Return what tokenizer_config.json beside a tokenizer's file says, and before it special_tokens_map.json; empty
    where there is none that can be read."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        with suppress(DataError, ValueError, RecursionError, TypeError):
            found.update(json.loads(read_file(path.parent / name)[1]))
    return found


def piece_named(settings: Mapping[str, Any], name: str) -> str:
    """Return the piece that tokenizer_config.json calls ``eos_token`` or the like; empty: it does not say."""
    value = settings.get(name)
    piece = value.get("content") if isinstance(value, dict) else value
    return piece if isinstance(piece, str) else ""


class HFTokenizer(LibraryTokenizer):
    """A tokenizer.json, through the ``tokenizers`` library. ``encode`` adds no special piece to a text, and finds none
    in it; ``added`` is what the file's post-processor puts around one.

    The end-of-document piece is ``eod``, or what tokenizer_config.json beside it calls ``eos_token``, or the first of
    ``END_PIECES`` that the vocabulary has.
    """

    def __init__(self, path: Path, *, eod: str = "") -> None:
        tokenizers = need("tokenizers", f"tokenizer {path}")
        path = path / "tokenizer.json" if path.is_dir() else path
        self.path, data = read_file(path)
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path}: not a readable tokenizer.json ({shortened(str(error), 200)})") from error
        # A file may cut or fill up what it encodes; a corpus has neither.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        self._decode = partial(tokenizer.decode, skip_special_tokens=False)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        settings = settings_beside(self.path)
        piece = eod or piece_named(settings, "eos_token")
        ends = [piece] if piece else [p for p in END_PIECES if p in vocabulary]
        if not ends or ends[0] not in vocabulary:
            raise DataError(f"{path}: {'no piece ' + repr(piece) if piece else 'nothing says which piece'} ends a "
                            "document; name it with --eod")
        self.eod_id = int(vocabulary[ends[0]])
        self.name = f"hf:{path}#{ends[0]}"
        self.hash = content_hash(data, self.eod_id)
        self.special: Mapping[str, int] = {
            token.content: id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.added = _added(tokenizer)
        bos = vocabulary.get(piece_named(settings, "bos_token"), -1)
        self.bos_id = int(bos) if bos >= 0 else next(iter(self.added.before), -1)

    def encode_spans(self, text: str) -> Spans:
        """Return ids of a text with special pieces; none is added."""
        found = self._with_special.encode(text, add_special_tokens=False)
        spans = np.asarray(found.offsets, dtype=np.int64).reshape(-1, 2)
        return Spans(np.asarray(found.ids, dtype=np.int64), spans[:, 0], spans[:, 1])

    @cached_property
    def _with_special(self) -> Any:
        """A tokenizer that reads special pieces, and whose spans keep the white space that post-processors cut off."""
        rules = json.loads(read_file(self.path)[1])
        tokenizer = need("tokenizers", self.name).Tokenizer.from_str(json.dumps({**rules, "post_processor": None}))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


def _added(tokenizer: Any) -> AddedIds:
    """Return what a file's post-processor puts around a text; transformers takes it from there alone."""
    found = tokenizer.encode("a")
    own = [i for i, added in enumerate(found.special_tokens_mask) if not added]
    first, end = (own[0], own[-1] + 1) if own else (len(found.ids), len(found.ids))
    return AddedIds(tuple(found.ids[:first]), tuple(found.ids[end:]))


class SentencePieceTokenizer(LibraryTokenizer):
    """A SentencePiece .model. The end of a document is ``eod``, or the model's own ``</s>``.

    The model itself adds nothing to a text; ``add_bos_token`` and ``add_eos_token`` of tokenizer_config.json beside it
    do, as in transformers.
    """

    def __init__(self, path: Path, *, eod: str = "") -> None:
        sentencepiece = need("sentencepiece", f"tokenizer {path}")
        self.path, data = read_file(path)
        try:
            model: Any = sentencepiece.SentencePieceProcessor(model_proto=data)
        except (RuntimeError, OSError) as error:
            raise DataError(f"{path}: not a readable SentencePiece model ({shortened(str(error), 200)})") from error
        self._encode, self._decode = model.encode, model.decode
        self.vocab_size = int(model.vocab_size())
        self.eod_id = int(model.piece_to_id(eod) if eod else model.eos_id())
        if self.eod_id < 0 or (eod and self.eod_id == model.unk_id()):
            raise DataError(f"{path}: {'no piece ' + repr(eod) if eod else 'the model has no </s>, so nothing'} ends a "
                            "document; name a piece with --eod")
        self.name = f"sentencepiece:{path}" + (f"#{eod}" if eod else "")
        self.hash = content_hash(data, self.eod_id)
        self._model = model
        control = {model.id_to_piece(i): i for i in range(self.vocab_size) if model.is_control(i)}
        self.special: Mapping[str, int] = {**control, model.id_to_piece(self.eod_id): self.eod_id}
        settings = settings_beside(self.path)
        self.bos_id = self._named(settings, "bos_token", model.bos_id())
        ends = self._named(settings, "eos_token", model.eos_id())
        self.added = AddedIds((self.bos_id,) if settings.get("add_bos_token") is True and self.bos_id >= 0 else (),
                              (ends,) if settings.get("add_eos_token") is True and ends >= 0 else ())

    def _named(self, settings: Mapping[str, Any], name: str, own: int) -> int:
        """Return the id of a piece that the settings name, otherwise the model's ``own``."""
        piece = piece_named(settings, name)
        found = self._model.piece_to_id(piece) if piece else own
        return int(own if found == self._model.unk_id() else found)

    def encode_spans(self, text: str) -> Spans:
        """Return ids of a text that is cut at the model's control pieces, which its own library takes for text."""
        ids: list[int] = []
        spans: list[list[int]] = []
        at = 0
        for part in re.split("(" + "|".join(map(re.escape, self.special)) + ")", text):
            if part in self.special:
                ids.append(self.special[part])
                spans.append([at, at + len(part)])
            elif part:
                found = self._offsets(part)
                ids += found["ids"]
                spans += [[at + first, at + end] for first, end in found["offsets"]]
            at += len(part)
        both = np.asarray(spans, dtype=np.int64).reshape(-1, 2)
        return Spans(np.asarray(ids, dtype=np.int64), both[:, 0], both[:, 1])

    def _offsets(self, text: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._model.encode(text, return_type="offset_mapping")
        except (TypeError, ValueError) as error:
            raise DataError(f"{self.name}: this sentencepiece has no offsets ({error}); run: pip install "
                            "'sentencepiece>=0.2.3'") from error
        return found


class TiktokenTokenizer(BytePairTokenizer):
    """A named encoding of tiktoken, which fetches its vocabulary once, or finds it in ``directory``."""

    def __init__(self, encoding: str, *, directory: str | Path | None = None, eod: str = "") -> None:
        tiktoken = need("tiktoken", f"tokenizer tiktoken:{encoding}")
        if directory is not None:
            os.environ["TIKTOKEN_CACHE_DIR"] = str(directory)
        try:
            super().__init__(tiktoken.get_encoding(encoding))
        except ValueError as error:
            raise DataError(f"tokenizer tiktoken:{encoding}: {shortened(str(error).splitlines()[0], 300)}; it has "
                            f"{', '.join(tiktoken.list_encoding_names())}") from error
        except Exception as error:  # requests' errors, of a library that may not be there
            raise DataError(
                f"tokenizer tiktoken:{encoding}: its vocabulary could not be fetched ({type(error).__name__}); "
                "fetch it where there is one, and name its folder: --tokenizer-dir or TIKTOKEN_CACHE_DIR") from error
        piece = eod or "<|endoftext|>"
        special = self._encoding._special_tokens
        if piece not in special:
            raise DataError(f"tokenizer tiktoken:{encoding}: no special piece {piece!r}; it has "
                            f"{', '.join(special)}: --eod")
        self.vocab_size, self.eod_id = int(self._encoding.n_vocab), int(special[piece])
        self.name = f"tiktoken:{encoding}" + (f"#{eod}" if eod else "")
        digest = hashlib.sha256(f"{self._encoding._pat_str}\0{self.eod_id}\0{self.vocab_size}".encode())
        for token, rank in sorted(self._encoding._mergeable_ranks.items(), key=lambda item: item[1]):
            digest.update(token + f"\0{rank}\0".encode())
        self.hash = digest.hexdigest()
